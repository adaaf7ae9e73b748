"""benchmarks/two_versions.py runs as it says, and tells when it has not the version that was asked for."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

SCRIPT = ROOT / "benchmarks" / "two_versions.py"


def run(*trees: Path) -> subprocess.CompletedProcess:
    flags = ["--model", "gpt-tiny", "--rounds", "1", "--stages", "0", "3"]
    return subprocess.run(
        [sys.executable, SCRIPT, *trees, *flags], capture_output=True, text=True, timeout=120
    )


@pytest.mark.long("a test of a program that is run by hand")
def test_two_versions_train_in_turns(tmp_path: Path):
    before = tmp_path / "before"
    before.mkdir()
    (before / "zerolab").symlink_to(ROOT / "zerolab")
    done = run(before, ROOT)
    assert done.returncode == 0, done.stderr
    names = re.findall(r"^(\S.*?) {2,}[\d.]+ +[\d.]+$", done.stdout, re.M)
    assert names == ["ddp", *(f"stage {stage} of {tree}" for tree in (before, ROOT) for stage in (0, 3))]


@pytest.mark.long("a test of a program that is run by hand")
def test_a_folder_without_the_package_is_no_version(tmp_path: Path):
    done = run(ROOT, tmp_path)
    assert done.returncode != 0 and re.search(r"which is not in|No module named 'zerolab'", done.stderr)
