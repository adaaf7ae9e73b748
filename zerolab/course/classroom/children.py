"""Run untrusted code in processes with a deadline, and leave none of them running."""

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

import zerolab

_BECOME_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux's prctl
_PATIENCE_SECONDS = 10.0


def python(module: str, *arguments: str, seconds: float) -> int | None:
    """Run a module in a Python of its own, silently. Returns its exit status, or None at the deadline."""
    root = str(Path(zerolab.__file__).parents[1])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with none_left():
        process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.{module}", *arguments],
            env=os.environ | {"PYTHONPATH": paths, "ZEROLAB_PROGRESS": "off"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt from the keyboard reaches the grader alone
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def none_left() -> Iterator[None]:
    """End every process that was started inside, also one that lost its parent or left its session."""
    _adopt(True)
    before = set(psutil.Process().children(recursive=True))
    try:
        yield
    finally:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while left := set(psutil.Process().children(recursive=True)) - before:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(list(left), timeout=1)
            if time.monotonic() > deadline:
                raise RuntimeError(f"these processes cannot be ended: {sorted(p.pid for p in left)}")
        _adopt(False)


def _adopt(orphans: bool) -> None:
    """Whether a process that loses its parent becomes a child of this one, where the system can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_BECOME_SUBREAPER, int(orphans), 0, 0, 0)
