"""Promise: the report on GPUs keeps what each part measured, whatever becomes of the others."""

import heapq
import json
import os
import sys
from pathlib import Path

import pytest
from support import ROOT

sys.path.insert(0, str(Path(__file__).parent))

import commands_part
import common
import parts
import report
from host_part import HOST_MS, busy_us
from speed_part import BATCHES, CONTESTANTS

from zerolab.launcher.gpus import visible_gpus


def hang() -> None:
    """Never ends."""
    import time

    time.sleep(3600)


def raises() -> None:
    """Fails."""
    raise ArithmeticError("on purpose")


def test_all_parts_together_take_at_most_eight_minutes():
    timed = sum(part.seconds for part in parts.PARTS.values() if part.is_timed)
    workers = [0] * report.TOGETHER
    for part in parts.PARTS.values():
        if not part.is_timed:
            heapq.heapreplace(workers, workers[0] + part.seconds)
    assert timed + max(workers) <= 480


@pytest.mark.long("a test of a program that is run by hand")
@pytest.mark.skipif(visible_gpus() > 0, reason="test_gpu.py runs them all")
@pytest.mark.parametrize(
    "name", ["versions", "collectives", "commands", "mismatch", "census", "waits", "jitter"]
)
def test_a_part_runs_through_without_a_gpu(name: str):
    """The other parts take longer; `python tests/gpu/report.py` runs all of them."""
    found = report.run_part(name)
    assert "error" not in found, found["error"]
    assert not found["missed"]


BROKEN = {
    "collectives": {"2 ranks": {"right": [True, False]}},
    "mismatch": {"model on the CPU": ["accepted, with a DirectComm"], "model on a GPU": "accepted"},
    "faults": {
        "kill": {"named": 1, "seconds": 6}, "raise": {"named": 1, "seconds": 1},
        "hang": {"named": [1], "seconds": 9},
    },
    "census": {"stage 0, zero_grad": {"allocated_bytes": 9 << 20, "engine_bytes": 1 << 20}},
    "waits": {"2 fp32": {"lines": ["unit/unit.py:1 x.item()"], "calls": {}}},
    "kernels": {"plain": 100, "2 fp32": 111, "2 mixed": 100},
    "jitter": {"stage 2, overlap 0": {"moved": ["weight"], "off_plain": 0.0}},
    "parity": [
        {"stage": 1, "world_size": 2, "precision": "fp32", "bit_identical": False, "max_abs_diff": 1e-7,
         "memory_matches": True, "traffic_matches": True}
    ],
    "speed": {
        f"{name}, batch {batch}": {"step_ms": 1.0, "peak_bytes": 1}
        for batch in BATCHES for name in CONTESTANTS
    } | {"zerolab-2, batch 16": {"step_ms": 1.1, "peak_bytes": 1}},
    "host": {name: {"over_plain_ms": 6.0 if name == "zerolab-1" else 1.0} for name in HOST_MS},
    "lessons": {"returned": 1, "failed": ["FAILED 00::Cell 1"], "summary": "1 failed"},
    "features": {
        "Muon, stage 1": {"bit_identical": False, "memory_matches": True, "traffic_matches": True},
        "hybrid": {"bit_identical": True, "memory_matches": True, "traffic_matches": True},
    },
    "tensor_parallel": {"stage 0, partitioned": {"moved": ["norm.weight"]}},
    "models": {"models": 2, "differ": {"odd: one, stage 2": ["weight"]}},
    "commands": {
        "verify": {"returned": 0, "says": True, "lines": ["All 8"]},
        "train": {"returned": 1, "says": True, "lines": ["killed"]},
    },
    "loops": {"findings": ["seed 1: differs"]},
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_result_that_breaks_a_promise_is_named(name: str):
    assert len(parts.PARTS[name].missed(BROKEN[name])) == 1


def test_kernels_that_run_beside_each_other_count_once():
    assert busy_us([(0, 10), (2, 5), (8, 12), (20, 21)]) == 13


def test_the_page_shows_rows_as_a_table():
    found = {"ddp": {"step_ms": 1.23456, "kernels": 1234}, "plain": {"step_ms": 2.0}}
    assert report.table(found).splitlines() == [
        "| | step_ms | kernels |", "|---|---|---|", "| ddp | 1.235 | 1,234 |", "| plain | 2 | None |",
    ]  # fmt: skip
    assert report.table({"a": {"b": [], "c": {"x": 1}}}).splitlines()[-1] == "| a | none | x: 1 |"
    assert report.table({"a": [1]}) is None and report.table("said") is None


@pytest.mark.long("a test of a program that is run by hand")
def test_a_part_that_hangs_or_fails_costs_itself_alone(monkeypatch, tmp_path: Path):
    script = tmp_path / "report.py"  # a copy of the script whose parts are these
    source = Path(report.__file__).read_text().replace("from parts import PARTS", "from broken import PARTS")
    script.write_text(source)
    (tmp_path / "broken.py").write_text(
        "from test_report import hang, raises\n"
        "from parts import Part\n"
        'PARTS = {"hangs": Part(hang, 3, None), "raises": Part(raises, 20, None)}\n'
    )
    folders = map(str, (ROOT, ROOT / "tests", Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    monkeypatch.setattr(report, "__file__", str(script))
    monkeypatch.setattr(common, "ON_A_CPU", 1)
    broken = {"hangs": parts.Part(hang, 10, None), "raises": parts.Part(raises, 20, None)}
    monkeypatch.setattr(report, "PARTS", broken)
    assert "ended after 10 seconds" in report.run_part("hangs")["error"]
    assert "ArithmeticError: on purpose" in report.run_part("raises")["error"]


def test_a_command_that_does_not_end_is_killed_and_named(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(commands_part, "COMMAND_SECONDS", 1)
    monkeypatch.setattr(common, "ON_A_CPU", 1)
    sleeps = commands_part.Command(["-c", "import time; time.sleep(3600)"], "done")
    (missed,) = commands_part.commands_missed({"sleeps": commands_part._run(str(tmp_path), sleeps)})
    assert missed.startswith("sleeps returned -9: ") and missed.endswith("ended after 1 seconds")


@pytest.mark.skipif(visible_gpus() > 0, reason="this machine has a GPU")
def test_a_trial_without_a_gpu_says_so(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(sys, "argv", ["report.py", "--out", str(tmp_path), "--parts", "versions"])
    assert report.main() == 0
    assert {path.name for path in tmp_path.iterdir()} == {"cpu-trial.json", "cpu-trial.md"}
    assert json.loads((tmp_path / "cpu-trial.json").read_text())["device"] == "CPU"
    assert "Nothing here says anything about GPUs" in (tmp_path / "cpu-trial.md").read_text()
