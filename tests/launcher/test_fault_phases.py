"""Promise: a rank with a fault is named, whatever the fault and the phase of a step, and nothing is lost."""

import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import PYTHONPATH, descendants
from support import faults, guides
from support.faults import KINDS, PHASES, STAGES, Fault, Outcome

from zerolab.launcher import forkclient

AT_ONCE = 3  # launches beside each other: ranks that hang need no processor
DEADLINE_SECONDS = 10.0  # by then all ranks are where they stay, on a busy machine too
WORLD_SIZES, PLACES, MOMENTS = (2, 3, 4), (0, 1, -1), ((0, False), (0, True), (1, False))

# Every phase in every kind of fault, and the rest spread over them so that any two things meet: an orthogonal
# array of 18 runs. In each row the first kind takes these levels, and the other kinds the next ones.
LEVELS = {
    #           world size, stage, step, place, moment
    "forward": (0, 0, 0, 0, 0),
    "backward": (0, 1, 1, 2, 2),
    "reduce": (1, 0, 2, 1, 2),
    "update": (1, 2, 0, 2, 1),
    "gather": (2, 1, 2, 0, 1),
    "save": (2, 2, 1, 1, 0),
}


def fault(phase: str, kind: str) -> Fault:
    size, stage, step, place, moment = ((level + KINDS.index(kind)) % 3 for level in LEVELS[phase])
    world_size, (call, late) = WORLD_SIZES[size], MOMENTS[moment]
    rank = PLACES[place] % world_size
    call = min(call, faults.calls_of(phase) - 1)
    return Fault(kind, phase, world_size, rank, STAGES[stage], step, call, late)


FAULTS = [fault(phase, kind) for kind in reversed(KINDS) for phase in PHASES]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Iterator[dict[Fault, Outcome]]:
    """All faults, several at a time; then all runs resumed, a launch for each world size."""
    scratch = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(AT_ONCE) as pool:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
        folders = {fault: scratch / str(index) for index, fault in enumerate(FAULTS)}
        outcomes = pool.map(lambda fault: faults.run_with(fault, folders[fault], DEADLINE_SECONDS), FAULTS)
        found = dict(zip(FAULTS, outcomes, strict=True))
        for size in WORLD_SIZES:
            alike = [fault for fault in FAULTS if fault.world_size == size]
            faults.judge([found[fault] for fault in alike], [folders[fault] for fault in alike])
        yield found


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_rank_with_the_fault_is_named_and_the_last_checkpoint_is_good(fault: Fault, outcomes):
    assert outcomes[fault].wrong == []


def test_no_process_and_no_file_is_left(outcomes):
    assert descendants(forkclient.current_pid()) == set()
    assert list(Path(tempfile.gettempdir()).glob("zerolab-*")) == []


def command(line: str) -> list[str]:
    """A ``./zero`` command of the guide, run by this Python."""
    return [sys.executable, "-m", "zerolab", *line.split()[1:]]


def test_the_commands_of_the_guide(tmp_path: Path, monkeypatch):
    """A rank of the first is killed, once there is a checkpoint, and the second goes on from it."""
    monkeypatch.chdir(tmp_path)
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    first, second, _ = guides.blocks("docs/when_a_rank_dies.md", "sh")
    (said,) = guides.blocks("docs/when_a_rank_dies.md", "text")
    settings = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command(first), **settings) as running:
        while not Path("runs/a/LATEST").exists():
            assert running.poll() is None, "it ended before it saved"
            time.sleep(0.02)
        (server,) = (pid for pid in descendants(running.pid) if len(descendants(pid)) == 4)
        os.kill(sorted(descendants(server))[2], signal.SIGKILL)
        _, complaint = running.communicate(timeout=60)
    assert running.returncode == 1
    assert re.sub(r"rank \d", "rank 2", complaint.splitlines()[-1]) == said.strip()
    saved = Path("runs/a/LATEST").read_text()
    done = subprocess.run(command(second), timeout=120, **settings)
    assert done.returncode == 0, done.stderr
    assert {line.split()[1] for line in done.stdout.splitlines() if "epoch 10" in line} == {"0", "1", "2"}
    assert Path("runs/a/LATEST").read_text() > saved


def test_any_two_things_meet_in_some_fault():
    """Phases, kinds, world sizes, stages and steps: whatever two are chosen, one fault has both."""
    names = ("phase", "kind", "world_size", "stage", "step")
    for one, other in itertools.combinations(names, 2):
        pairs = {(getattr(fault, one), getattr(fault, other)) for fault in FAULTS}
        assert len(pairs) == (18 if one == "phase" else 9), (one, other)
