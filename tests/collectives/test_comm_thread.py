"""The communication thread starts collectives in their order, without waiting for an earlier one."""

import gc
import threading

import pytest

from zerolab.collectives import Work
from zerolab.collectives.comm_thread import CommThread


def run_together(*collectives) -> None:
    """Submit all before the first is started, so that the order does not depend on time."""
    thread, submitted = CommThread(), threading.Event()

    def hold():
        assert submitted.wait(5)
        yield

    waits = [thread.submit(hold()), *map(thread.submit, collectives)]
    submitted.set()
    for wait in waits:
        wait()


def rounds(name: str, count: int, order: list):
    for number in range(1, count + 1):
        order.append(f"{name}{number}")
        yield


def test_every_collective_is_started_before_the_thread_waits_for_one():
    order = []
    run_together(rounds("a", 1, order), rounds("b", 1, order), rounds("c", 1, order))
    assert order == ["a1", "b1", "c1"]


def test_the_oldest_goes_through_all_its_rounds_before_the_next_is_resumed():
    """Else ranks that have submitted different numbers of collectives could wait for one another."""
    order = []
    run_together(rounds("a", 3, order), rounds("b", 2, order))
    assert order == ["a1", "b1", "a2", "a3", "b2"]


def test_after_an_error_everything_under_way_and_to_come_ends_in_it():
    thread, submitted = CommThread(), threading.Event()

    def under_way():
        assert submitted.wait(5)
        yield
        yield

    def wrong():
        yield
        raise RuntimeError("another path")

    waits = [thread.submit(under_way()), thread.submit(wrong()), thread.submit(under_way())]
    submitted.set()
    with pytest.raises(RuntimeError, match="another path"):
        waits[1]()
    for wait in [waits[2], thread.submit(under_way())]:
        with pytest.raises(RuntimeError, match="another path"):
            wait()


def test_its_thread_ends_with_it_and_after_what_is_under_way():
    thread, came, done = CommThread(), threading.Event(), threading.Event()

    def last():
        yield
        assert came.wait(5)
        yield
        done.set()

    thread.submit(last())
    worker = thread._thread
    del thread
    gc.collect()
    came.set()
    worker.join(5)
    assert done.is_set() and not worker.is_alive()


def test_a_collective_that_ended_is_let_go():
    """It holds buffers as large as a unit, and no other collective may come for long."""
    thread = CommThread()

    class Buffer:
        pass

    buffer = Buffer()
    released = threading.Event()

    def collective(held):
        yield
        del held

    import weakref

    weakref.finalize(buffer, released.set)
    wait = thread.submit(collective(buffer))
    del buffer
    wait()
    assert released.wait(5)


def test_a_wait_that_failed_fails_again_and_runs_nothing_that_was_chained():
    """So that a parameter whose gather failed is never taken for one that is there."""

    def failing() -> None:
        raise RuntimeError("connection closed")

    done: list[str] = []
    work = Work([lambda: done.append("first"), failing, lambda: done.append("third")])
    work.then(lambda: done.append("chained"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection closed"):
            work.wait()
    assert done == ["first"]
