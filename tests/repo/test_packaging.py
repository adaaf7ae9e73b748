"""Promise: what is said in two places agrees: guides, pins, pyproject, Binder, continuous integration."""

import ast
import itertools
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support import ROOT, guides

import zerolab


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


def test_continuous_integration_runs_the_test_command_of_the_guide():
    first, *_ = guides.blocks("CONTRIBUTING.md", "sh")
    assert (ROOT / ".ci/run").read_text("utf-8").splitlines()[-1] == first.strip() == "./zero test"


def test_the_scripts_can_be_run_from_a_clone():
    for name in ("zero", ".ci/run", "binder/postBuild", "cloud/gpu.sh", "tools/colab.sh"):
        assert (ROOT / name).stat().st_mode & stat.S_IXUSR, f"{name} is not executable"
        subprocess.run(["sh", "-n", str(ROOT / name)], check=True)


def test_what_the_package_needs_is_pinned_within_its_range():
    pinned = pins("requirements.txt")
    extras = project()["optional-dependencies"].values()
    for need in requirements([*project()["dependencies"], *itertools.chain(*extras)]).values():
        assert pinned[need.name] in need.specifier, f"{need}, but requirements.txt pins {pinned[need.name]}"


@pytest.mark.parametrize(
    "version, taken", [("2.10.0", False), ("2.11.0", True), ("2.13.1", True), ("2.14.0", False)]
)
def test_the_range_of_torch_is_the_one_the_guide_names(version: str, taken: bool):
    assert (version in requirements(project()["dependencies"])["torch"].specifier) == taken
    assert "torch 2.11 to 2.13" in guides.text("docs/setup.md")


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
    class_needs = requirements(project()["optional-dependencies"]["classroom"]).keys()
    classroom = set((ROOT / "zerolab/course/classroom").rglob("*.py"))
    course = set((ROOT / "zerolab/course").rglob("*.py")) - classroom
    benchmark = set((ROOT / "zerolab/bench").rglob("*.py"))
    assert imported(set((ROOT / "zerolab").rglob("*.py")) - course - benchmark - classroom) <= needs
    assert imported(benchmark) <= needs | OPTIONAL
    assert imported(course) <= needs | course_needs
    assert imported(classroom) <= needs | course_needs | class_needs
    a_readers = [
        ROOT / f"zerolab/course/classroom/{name}.py" for name in ("record", "progress_page", "clone")
    ]
    assert imported(a_readers) == set(), "Colab and Binder have no libraries for a class"


def test_binder_takes_the_same_versions_and_the_cpu_build():
    ours, binder = pins("requirements.txt"), pins("binder/requirements.txt")
    assert binder.pop("torch") == ours.pop("torch") + "+cpu"
    assert binder.items() <= ours.items()
    needs = requirements(project()["dependencies"] + project()["optional-dependencies"]["course"])
    assert needs.keys() - {"torch"} <= binder.keys()
    assert (ROOT / "binder/runtime.txt").read_text("utf-8").strip() == "python-3.12"


MAP = "docs/architecture.md"


def test_every_module_is_on_the_map_of_the_architecture():
    (drawn,) = guides.blocks(MAP, "text")
    on_map = set(re.findall(r"\b\w+\.py\b", drawn))
    public = {path.name for path in (ROOT / "zerolab").glob("[!_]*.py")}
    packages = {path.parent.name for path in (ROOT / "zerolab").glob("*/__init__.py")}
    assert on_map == public | {"stage0.py", "stage3.py", "hybrid.py"}
    assert packages == set(re.findall(r"^(\w+)/", drawn, re.M))


# ---- the version


def test_the_version_is_the_one_of_pyproject(tmp_path: Path):
    """In a clone pyproject.toml is asked; elsewhere the metadata that pip installed."""
    assert zerolab.__version__ == project()["version"]
    assert "__version__ = " not in (ROOT / "zerolab/__init__.py").read_text("utf-8")
    shutil.copytree(ROOT / "zerolab", tmp_path / "zerolab", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "zerolab-9.8.7.dist-info").mkdir()
    (tmp_path / "zerolab-9.8.7.dist-info/METADATA").write_text("Name: zerolab\nVersion: 9.8.7\n")
    assert said(tmp_path, "--version") == "zerolab 9.8.7\n"
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "zerolab"\nversion = "1.2.3"\n')
    assert said(tmp_path, "--version") == "zerolab 1.2.3\n"
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\nversion = "1.2.3"\n')
    assert said(tmp_path, "--version") == "zerolab 9.8.7\n"


def said(folder: Path, *words: str) -> str:
    """What the package in the folder says to these words; it must not load torch for them."""
    (folder / "torch.py").write_text("raise ImportError('torch was loaded')")
    command = [sys.executable, "-m", "zerolab", *words]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    ).stdout


# ---- types


def test_type_checkers_are_told_the_names_of_the_face():
    """``__getattr__`` tells them nothing, so the imports under TYPE_CHECKING must name what it finds."""
    tree = ast.parse((ROOT / "zerolab/__init__.py").read_text("utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    told = {alias.name: node.module.removeprefix("zerolab.") for node in imports for alias in node.names}
    assert ast.unparse(block.test) == "TYPE_CHECKING" and told == zerolab._MODULE_OF


def test_the_mark_of_a_typed_package_is_installed_with_it():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]
    assert "py.typed" in tools["setuptools"]["package-data"]["zerolab"]
    assert (ROOT / "zerolab/py.typed").exists()
