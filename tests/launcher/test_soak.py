"""Promise: a soak runs the faults of its seed, reports them all, and fails if one was not handled."""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import soak
from conftest import PYTHONPATH
from support import faults, guides
from support.faults import Fault, Outcome

import zerolab

FAULTS, SEED = 6, 102  # of every kind, and a hang but once


@pytest.mark.long("a test of a program that is run by hand")
def test_a_short_soak_as_it_is_run_by_hand(tmp_path: Path):
    """And the folder for the report is made."""
    out = tmp_path / "benchmarks" / "results"
    command = ["--faults", str(FAULTS), "--seed", str(SEED), "--deadline", "8", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, soak.__file__, *command],
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((out / f"soak-{FAULTS}-seed-{SEED}.json").read_text())
    text = (out / f"soak-{FAULTS}-seed-{SEED}.md").read_text()
    assert done.stdout.endswith(text + "\n")
    counts = {"faults": FAULTS, "named_rightly": FAULTS, "left_over": 0, "lost": 0}
    assert found["summary"].items() >= counts.items()
    assert found["summary"]["median_and_most_seconds"].keys() == set(faults.KINDS)
    planned = itertools.islice(soak.planned_faults(SEED), FAULTS)
    assert [outcome["named"] for outcome in found["outcomes"]] == [[fault.rank] for fault in planned]
    assert f"- Named rightly: {FAULTS} of {FAULTS}.\n- Left over, processes and files: 0.\n- Lost" in text


def test_the_guide_says_what_the_committed_soak_found():
    root = Path(soak.__file__).parents[1]
    found = json.loads((root / "benchmarks/results/soak-100-seed-0.json").read_text())
    page = guides.text("docs/when_a_rank_dies.md").replace("\n", " ")
    assert found["command"] in page and found["command"] in (root / "tests/soak.py").read_text()
    assert [len(found["outcomes"]), *(each["wrong"] for each in found["outcomes"])] == [100, *[[]] * 100]
    most = max(seconds for _, seconds in found["summary"]["median_and_most_seconds"].values())
    assert f"100 of 100 named, nothing left over, nothing lost, and {most:.1f} seconds to the report" in page


def test_a_seed_is_one_order_of_all_faults():
    every = 3 * 6 * 9 * 3
    first, again, other = (list(itertools.islice(soak.planned_faults(seed), every)) for seed in (0, 0, 1))
    assert first == again != other
    once = Counter((f.kind, f.phase, f.world_size, f.rank, f.stage) for f in first)
    assert len(once) == every and set(once.values()) == {1}
    assert all(f.rank < f.world_size and f.call < faults.calls_of(f.phase) for f in first)
    assert len({f.step for f in first}) == 3 and {f.late for f in first} == {True, False}


FAULT = Fault("raise", "save", world_size=2, rank=1, stage=2, step=1)
RIGHTLY = zerolab.WorkerError("rank 1 failed: OSError: rank 1 failed with Injected: in save", rank=1)
WRONG = {
    "another rank": Outcome(FAULT, zerolab.WorkerError(str(RIGHTLY), rank=0), 0.1),
    "another cause": Outcome(FAULT, zerolab.WorkerError("rank 1 failed: connection closed", rank=1), 0.1),
    "a deadline": Outcome(FAULT, zerolab.LaunchTimeout("in save: Injected: in save", (1,)), 0.1),
    "no error": Outcome(FAULT, None, 0.1),
    "a process left": Outcome(FAULT, RIGHTLY, 0.1, left=["process 7"]),
    "a weight lost": Outcome(FAULT, RIGHTLY, 0.1, lost=["before.weight after 1 steps"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_fault_that_was_not_handled_fails_the_soak(name: str, monkeypatch, capsys, tmp_path: Path):
    outcomes = [Outcome(FAULT, RIGHTLY, 0.1), WRONG[name]]
    monkeypatch.setattr(soak, "run_all", lambda planned, deadline_seconds: iter(outcomes))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert soak.main(["--faults", "2", "--out", str(tmp_path)]) == 1
    assert "- WRONG: raise      in save" in capsys.readouterr().out
    good, bad = json.loads((tmp_path / "soak-2-seed-0.json").read_text())["outcomes"]
    assert good["wrong"] == [] and len(bad["wrong"]) == 1


def test_a_fault_that_never_happens_and_a_process_that_stays_are_found(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    never = Fault("kill", "update", world_size=2, rank=1, stage=1, step=1, call=99)
    outcome = faults.run_with(never, tmp_path / "never", deadline_seconds=5)
    faults.judge([outcome], [tmp_path / "never"])
    assert outcome.wrong[0] == "not named: nothing was reported"
    assert outcome.lost == ["3 steps were saved, not 1"] * 2

    monkeypatch.setattr(faults, "LEAVE_SECONDS", 0.1)
    (tmp_path / "never" / "pid-0").write_text(str(os.getpid()))
    assert list(faults.leftovers(tmp_path / "never")) == [f"process {os.getpid()}"]


def test_a_checkpoint_of_other_numbers_is_found(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    fault = Fault("kill", "save", world_size=2, rank=1, stage=1, step=1)

    def another_rate(folder: Path, fault: Fault) -> None:
        faults.training.DEFAULTS = faults.training.DEFAULTS | {"lr": 0.0501}
        faults.train(folder, fault)

    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(zerolab.WorkerError) as caught:
        zerolab.launch(another_rate, 2, folder, fault, backend="gloo", timeout=60)
    outcome = Outcome(fault, caught.value, 0.0)
    faults.judge([outcome], [folder])
    assert outcome.named_rightly and "before.weight after 1 steps" in outcome.lost
