"""Fixtures for tests that start processes."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import zerolab
from zerolab.launcher import forkclient

if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):  # a shell starts `command &` so, and children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["ZEROLAB_PROGRESS"] = "off"  # nobody's record of progress is written
forkclient.SERVER = Path(__file__).parent / "support" / "fork_server.py"  # as the launcher's, and quicker
torch.set_num_threads(1)  # as many tests run at once as there are cores; ranks have threads of their own
PATIENCE_SECONDS = 10.0  # generous: a busy machine is no failure
PYTHONPATH = os.pathsep.join((str(Path(zerolab.__file__).parents[1]), str(Path(__file__).parent)))


def descendants(root: int) -> set[int]:
    """Every process started by `root` or by its descendants that still exists, zombies included."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(path.parent.name)] = int(fields[1])
    found = {root}
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return found - {root}


def eventually(condition) -> bool:
    """Whether `condition()` comes true within the patience of a test."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def runs(pid: int) -> bool:
    """Whether a process still runs; one that has ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def run_script(source: str, cwd: Path, stdin: bool = False) -> str:
    """What a Python program prints; through stdin it is a main module without a file, as a notebook is."""
    source = textwrap.dedent(source)
    path = cwd / "program.py"
    path.write_text(source)
    done = subprocess.run(
        [sys.executable, "-" if stdin else str(path)],
        input=source if stdin else None,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Fail a test that leaves a process behind; the fork server alone may stay, it serves every launch."""
    before = descendants(os.getpid())
    yield

    def left() -> set[int]:
        return descendants(os.getpid()) - before - {forkclient.current_pid()}

    assert eventually(lambda: not left()), f"the test left processes running: {sorted(left())}"
