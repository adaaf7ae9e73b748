"""Promise: one command runs every lesson with Colab's versions, and GitHub runs the same command."""

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from support import ROOT, guides
from support.stub_machine import Machine

SCRIPT, LIST = "tools/colab.sh", "tools/colab.txt"


def test_the_job_is_the_command_of_the_guide():
    jobs = yaml.safe_load((ROOT / ".github/workflows/notebooks.yml").read_text("utf-8"))["jobs"]
    assert [step["run"] for step in jobs["colab"]["steps"] if "run" in step] == [SCRIPT]
    assert f"{SCRIPT}\n" in guides.blocks("CONTRIBUTING.md", "sh")


def test_colabs_versions_are_installed_and_what_the_lessons_import():
    lines = re.findall(r"^[a-z].*$", (ROOT / LIST).read_text("utf-8"), re.M)
    versions = {each.name: str(each.specifier) for each in map(Requirement, lines)}
    assert (versions["ipywidgets"], versions["ipython"]) == ("==7.7.1", "==7.34.0")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needs = [
        Requirement(line) for line in project["dependencies"] + project["optional-dependencies"]["course"]
    ]
    assert {need.name for need in needs} | {"nbval", "pytest"} <= versions.keys()
    (torch,) = (need.specifier for need in needs if need.name == "torch")
    assert versions["torch"].removeprefix("==") in torch


def test_it_installs_once_and_compares_every_lesson(tmp_path: Path):
    """On a machine of stub tools: the folder, or the lessons that are named, go to nbval."""
    machine = Machine(tmp_path)
    code, said, calls = machine.run(SCRIPT)
    assert (code, said) == (0, "")
    assert calls[0] == "-m venv build/colab"
    assert calls[1].endswith(f"-r {LIST}") and calls[2].endswith("--no-deps -e .")
    assert calls[3].startswith("-m pytest --nbval notebooks --nbval-sanitize-with tests/nbval_sanitize.cfg ")
    (again,) = machine.run(SCRIPT, "notebooks/00_ranks.ipynb")[2]
    assert again.startswith("-m pytest --nbval notebooks/00_ranks.ipynb --nbval-sanitize-with ")
    (machine.clone / LIST).write_text("torch==2.12.0\n")
    assert len(machine.run(SCRIPT)[2]) == 4, "another list is installed"


def test_a_lesson_that_differs_fails_the_command(tmp_path: Path):
    assert Machine(tmp_path).run(SCRIPT, STUB_FAILS="--nbval")[0] == 1


def test_a_failed_install_is_made_again(tmp_path: Path):
    machine = Machine(tmp_path)
    assert machine.run(SCRIPT, STUB_PIP="no network")[0] == 1
    assert machine.run(SCRIPT)[2][0] == "-m venv build/colab"
