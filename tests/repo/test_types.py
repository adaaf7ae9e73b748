"""Promise: mypy finds no error in the package, and every function behind a public name is annotated."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

pytest.importorskip("mypy", reason="mypy is not installed; requirements.txt pins it")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first run learns of torch's types, which takes it most of its time."""
    return tmp_path_factory.mktemp("mypy")


def check(root: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(cache)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280)


def test_mypy_finds_no_error(cache: Path):
    found = check(ROOT, cache)
    assert (found.returncode, found.stderr) == (0, ""), found.stdout


def test_mypy_finds_a_wrong_type_and_a_public_function_without_types(tmp_path: Path, cache: Path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "zerolab", tmp_path / "zerolab", ignore=shutil.ignore_patterns("__pycache__"))
    for name, planted in {
        "stages/stage2.py": "PLANTED: int = 'a string'\n",
        "launcher/launcher.py": "def planted(rank):\n    return rank\n",
        "engine/units.py": "def planted(rank):\n    return rank\n",  # no public name: types may be left out
    }.items():
        with open(tmp_path / "zerolab" / name, "a", encoding="utf-8") as file:
            file.write(planted)
    found = check(tmp_path, cache)
    assert found.returncode == 1
    errors = [line for line in found.stdout.splitlines() if ": error: " in line]
    assert sorted(line.split(":")[0] for line in errors) == [
        "zerolab/launcher/launcher.py",
        "zerolab/stages/stage2.py",
    ]
