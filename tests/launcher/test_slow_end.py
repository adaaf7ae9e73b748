"""Promise: launch returns when its ranks are gone, however long a driver holds them after a kill."""

import logging
import signal
import threading

import pytest
import torch.distributed as dist
from conftest import descendants
from support.lessons import solutions_travel_by_value

import zerolab
from zerolab.launcher import forkclient, watch

solutions_travel_by_value(__name__)
TEARDOWN_SECONDS = 3.0


def fail_beside_one_that_ignores_sigterm() -> None:
    if dist.get_rank() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        dist.barrier()
        sum(range(10**15))  # holds the interpreter, so no thread of the rank can end it
    dist.barrier()
    raise ValueError("the cause")


@pytest.fixture
def slow_kills(monkeypatch):
    """SIGKILL takes its time, as for a process whose driver frees a GPU first."""
    send = forkclient.ForkServer.signal
    timers = []

    def signal_later(server, launch: int, rank: int, number: int) -> None:
        if number != signal.SIGKILL:
            return send(server, launch, rank, number)
        timers.append(threading.Timer(TEARDOWN_SECONDS, send, (server, launch, rank, number)))
        timers[-1].start()

    monkeypatch.setattr(forkclient.ForkServer, "signal", signal_later)
    yield
    for timer in timers:
        timer.join()


def launch_and_fail() -> set[int]:
    """The ranks that are left when launch has raised its error."""
    with pytest.raises(zerolab.WorkerError, match="the cause"):
        zerolab.launch(fail_beside_one_that_ignores_sigterm, 2)
    return descendants(forkclient.current_pid())


def test_no_rank_is_left_where_a_kill_takes_seconds(slow_kills, caplog):
    assert launch_and_fail() == set() and not caplog.records


def test_a_rank_that_does_not_end_is_named(slow_kills, monkeypatch, caplog):
    monkeypatch.setattr(watch, "KILLED_SECONDS", 0.2)
    monkeypatch.setattr(logging.getLogger("zerolab"), "filters", [])  # the course lets it through once
    assert len(launch_and_fail()) == 1
    assert caplog.records[0].getMessage().startswith("rank 0 had not ended 0.2 seconds after SIGKILL")
