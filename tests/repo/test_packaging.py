"""Promise: what is said in two places agrees: README, pins, pyproject, Binder, continuous integration."""

import ast
import json
import os
import re
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support import ROOT


def pins(path: str) -> dict[str, str]:
    """Name → version; every requirement must be pinned exactly."""
    lines = [line for line in (ROOT / path).read_text("utf-8").splitlines() if line and line[0] not in "#-"]
    found = dict(line.split("==") for line in lines)
    assert len(found) == len(lines), f"{path} names a package twice"
    return found


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def requirements(lines: list[str]) -> dict[str, Requirement]:
    return {Requirement(line).name: Requirement(line) for line in lines}


def readme_commands() -> list[str]:
    """The commands of the README's section of that name: one to a fenced block."""
    section = (ROOT / "README.md").read_text("utf-8").split("## Two commands")[1].split("\n## ")[0]
    return [block.strip() for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL)]


def test_continuous_integration_runs_the_readmes_test_command():
    assert readme_commands() == ["./zero lab", "./zero verify", "./zero test"]
    assert (ROOT / ".ci/run").read_text("utf-8").splitlines()[-1] == readme_commands()[-1]


@pytest.mark.parametrize("guide", ["README.md", "cloud/README.md"])
def test_the_guides_name_the_repository_of_pyproject(guide: str):
    text = (ROOT / guide).read_text("utf-8")
    named = re.findall(
        r"(?:github\.com|colab\.research\.google\.com/github|mybinder\.org/v2/gh)/([\w-]+/[\w-]+)", text
    )
    assert named and set(named) == {project()["urls"]["Repository"].removeprefix("https://github.com/")}


def test_the_scripts_can_be_run_from_a_clone():
    for name in ("zero", ".ci/run", "binder/postBuild", "cloud/gpu.sh"):
        assert (ROOT / name).stat().st_mode & stat.S_IXUSR, f"{name} is not executable"
        subprocess.run(["sh", "-n", str(ROOT / name)], check=True)


def test_what_the_package_needs_is_pinned_within_its_range():
    pinned = pins("requirements.txt")
    for need in requirements(
        project()["dependencies"] + project()["optional-dependencies"]["course"]
    ).values():
        assert pinned[need.name] in need.specifier, f"{need}, but requirements.txt pins {pinned[need.name]}"


@pytest.mark.parametrize(
    "version, taken", [("2.10.0", False), ("2.11.0", True), ("2.13.1", True), ("2.14.0", False)]
)
def test_the_range_of_torch_is_the_one_the_readme_names(version: str, taken: bool):
    assert (version in requirements(project()["dependencies"])["torch"].specifier) == taken
    assert "torch 2.11 to 2.13" in (ROOT / "README.md").read_text("utf-8")


def imported(files: Iterable[Path]) -> set[str]:
    """The packages, neither ours nor Python's own, that these files import anywhere."""
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text("utf-8"), str(path)))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    packages = {name.split(".")[0] for name in names} - {"zerolab"} - set(sys.stdlib_module_names)
    return {name.lower() for name in packages}


OPTIONAL = {"matplotlib", "deepspeed"}
"""What bench takes up where it is there, and names where it is not."""


def test_what_is_imported_is_declared():
    needs = requirements(project()["dependencies"]).keys()
    course_needs = requirements(project()["optional-dependencies"]["course"]).keys()
    course = set((ROOT / "zerolab/course").rglob("*.py"))
    benchmark = set((ROOT / "zerolab/bench").rglob("*.py"))
    assert imported(set((ROOT / "zerolab").rglob("*.py")) - course - benchmark) <= needs
    assert imported(benchmark) <= needs | OPTIONAL
    assert imported(course) <= needs | course_needs


def test_binder_takes_the_same_versions_and_the_cpu_build():
    ours, binder = pins("requirements.txt"), pins("binder/requirements.txt")
    assert binder.pop("torch") == ours.pop("torch") + "+cpu"
    assert binder.items() <= ours.items()
    needs = requirements(project()["dependencies"] + project()["optional-dependencies"]["course"])
    assert needs.keys() - {"torch"} <= binder.keys()
    assert (ROOT / "binder/runtime.txt").read_text("utf-8").strip() == "python-3.12"


def readme_section(title: str) -> str:
    return (ROOT / "README.md").read_text("utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_module_is_on_the_readmes_map():
    on_map = set(re.findall(r"\b\w+\.py\b", readme_section("The house, in reading order")))
    public = {path.name for path in (ROOT / "zerolab").glob("[!_]*.py")}
    packages = {path.parent.name for path in (ROOT / "zerolab").glob("*/__init__.py")}
    assert public <= on_map
    assert packages == set(re.findall(r"^(\w+)/", readme_section("The house, in reading order"), re.M))
    tests = {"test_arrows.py", "test_clipping.py"}
    assert on_map - public == {"stage0.py", "stage3.py", "__init__.py", "build.py"} | tests


def test_every_file_the_readme_names_is_there():
    text = (ROOT / "README.md").read_text("utf-8")
    named = re.findall(r"\]\(([\w./]+)\)|`((?:tests|notebooks|binder|cloud)/[\w./]*)`", text)
    assert [name for pair in named for name in pair if name and not (ROOT / name).exists()] == []


def test_the_readmes_example_runs(tmp_path: Path):
    """As a script of its own, without a guard around it: what a reader would paste."""
    example = tmp_path / "example.py"
    example.write_text(re.search(r"```python\n(.*?)```", readme_section("The engine"), re.DOTALL)[1])
    done = subprocess.run(
        [sys.executable, str(example)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 2
