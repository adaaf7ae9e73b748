"""Promise: the recipes for rented machines name what is there, and SkyPilot can read its file."""

import os
import re
import subprocess

import pytest
import yaml
from support import ROOT, guides

SKY = ROOT / "cloud/sky.yaml"
RECIPES = sorted(path.name for path in (ROOT / "cloud").iterdir() if path.name != "README.md")


def test_every_recipe_is_on_the_page():
    page = guides.text("cloud/README.md")
    assert RECIPES and [name for name in RECIPES if name not in page] == []


def test_skypilots_file_starts_the_script_of_the_clone():
    task = yaml.safe_load(SKY.read_text("utf-8"))
    assert task.keys() == {"name", "workdir", "resources", "setup", "run"}
    assert task["workdir"] == "."  # commands run in the copy of the clone
    assert os.access(ROOT / task["run"].split()[-1], os.X_OK)
    for script in (task["setup"], task["run"]):
        subprocess.run(["sh", "-nc", script], check=True)


def test_the_python_that_skypilot_installs_is_one_that_zero_takes():
    task = yaml.safe_load(SKY.read_text("utf-8"))
    (installed,) = re.findall(r"uv python install (\S+)$", task["setup"])
    (found,) = re.findall(r"uv python find (\S+)\)", task["run"])
    (taken,) = re.findall(r"^ +(3\.[\d .|]+)\) ", (ROOT / "zero").read_text("utf-8"), re.M)
    assert installed == found and installed in taken.split(" | ")


def test_the_address_on_the_page_has_the_port_of_the_script():
    """JupyterLab listens there, and ssh leads there."""
    (port,) = re.findall(r"^port=\$\{PORT:-(\d+)\}$", (ROOT / "cloud/gpu.sh").read_text("utf-8"), re.M)
    for name in ("cloud/README.md", "cloud/sky.yaml"):
        assert set(re.findall(r"ssh -N -L (\S+)", guides.text(name))) == {f"{port}:127.0.0.1:{port}"}


def test_skypilots_own_parser_reads_it():
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(SKY))
    assert all(set(resources.accelerators.values()) == {4} for resources in task.resources)
