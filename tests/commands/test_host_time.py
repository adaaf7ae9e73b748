"""benchmarks/host_time.py runs as it says, and its columns follow from what was measured."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "host_time.py"


@pytest.mark.long("a test of a program that is run by hand")
def test_every_contestant_is_measured_and_the_table_is_written(tmp_path: Path):
    command = [sys.executable, str(SCRIPT), "--rounds", "1", "--out", str(tmp_path / "made")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "made/host_time.txt").read_text() == done.stdout
    rows = [line[:18].strip() for line in done.stdout.splitlines()[4:]]
    assert rows[:3] == ["floor", "ddp", "fully_shard"] and len(rows) == 10


def test_the_columns_are_the_time_over_the_plain_loop_and_its_ratios():
    spec = importlib.util.spec_from_file_location("host_time", SCRIPT)
    host_time = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(host_time)
    lines = host_time.table({"floor": 5.0, "ddp": 7.0, "fully_shard": 25.0, "zerolab-2": 10.0}).splitlines()
    assert lines[-1].split() == ["zerolab-2", "10.00", "+5.00", "2.50", "0.25"]
    assert lines[2].split() == ["ddp", "7.00", "+2.00", "1.00", "0.10"]
