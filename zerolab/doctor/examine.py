"""Run each probe in a process of its own, so that a hang can be ended and a crash does not affect others."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple


class Probe(NamedTuple):
    """A line of the report: `look` says what it found or raises; `way_out` is for who reads its error."""

    name: str
    look: Callable[[], str]
    way_out: str
    needed: bool = True  # by the course; else the line informs


class Finding(NamedTuple):
    """What came of a probe: what works, or its error, and the module whose absence is that error."""

    works: bool
    text: str
    missing: str = ""


def examine(probe: Probe, seconds: float) -> Finding:
    """Look, within a deadline. Whether it answered or not, nothing that it started is left."""
    fork = multiprocessing.get_context("fork")  # at no cost: the command itself has imported nothing large
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=answer, args=(probe, theirs))
    try:
        process.start()
    except OSError as error:
        return Finding(False, f"no process could be started for it: {error}")
    theirs.close()
    assert process.pid is not None  # it was started
    try:
        if ours.poll(seconds):
            return ours.recv()
        return Finding(False, f"no answer after {seconds:g} seconds")
    except EOFError:
        process.join()
        return Finding(False, f"its process ended with {exit_text(process.exitcode or 0)}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        ours.close()


def answer(probe: Probe, answers: Connection) -> None:
    """In the probe's process: look, in silence, and send what came of it."""
    os.setsid()  # a group of its own, so that what it starts can be ended with it
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    try:
        finding = Finding(True, probe.look())
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        finding = Finding(False, text, (isinstance(error, ModuleNotFoundError) and error.name) or "")
    answers.send(finding)


def exit_text(code: int) -> str:
    """Return how a process ended without an answer."""
    return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"
