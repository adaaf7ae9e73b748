"""Courier: a thread that carries one rank's collectives out while the main thread goes on computing.

To post a message takes longer than it looks: gloo copies what is sent under a lock that the next message
waits for. And a sum can be taken, or an all-reduce's second half begun, only when messages are in. So each
collective is written as one would for a single thread, and a thread runs it: a generator that posts its
messages, yields, and only when it is resumed waits for them. What comes meanwhile is posted before the thread
goes back to wait, so that the network always has the next messages at hand: waited for one by one,
collectives of 4.5 MB took twice as long.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue

import torch

Job = Iterator[None]
"""A collective: it yields where it is about to wait for messages it has posted."""


class Courier:
    """Starts jobs in the order they come. Its thread ends with it, and with the process."""

    def __init__(self):
        self._jobs: SimpleQueue[Delivery | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def carry(self, job: Job) -> "Delivery":
        """Have ``job`` start after those before it. To wait for it is to have its end, or its error."""
        if self._thread is None:
            # A daemon: one that waits for a rank that is gone must not keep the process from ending.
            self._thread = threading.Thread(target=_deliver, args=(self._jobs,), daemon=True, name="courier")
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        delivery = Delivery(job)
        self._jobs.put(delivery)
        return delivery


class Delivery:
    """A job on its way."""

    def __init__(self, job: Job):
        self._job: Job | None = job
        self._done = threading.Event()
        self._error: BaseException | None = None

    def advance(self) -> bool:
        """Run the job up to where it is about to wait; whether it has more to do. Raises: what it raises."""
        try:
            next(self._job)
            return True
        except StopIteration:
            self._close(None)
            return False

    def fail(self, error: BaseException) -> None:
        """Give the job up."""
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        self._error = error
        self._job = None  # it holds buffers
        self._done.set()

    def wait(self) -> None:
        """Wait until the job is done. Raises: what the job raised, or the first before it that failed."""
        self._done.wait()
        if self._error is not None:
            raise self._error


@torch.no_grad()
def _deliver(jobs: "SimpleQueue[Delivery | None]") -> None:
    """The thread: start whatever has come, then wait for the oldest under way; and so on."""
    under_way: deque[Delivery] = deque()
    while (delivery := _next(jobs, under_way)) is not None:
        try:
            if delivery.advance():
                under_way.append(delivery)
        except BaseException as error:
            _give_up(error, [delivery, *under_way], jobs)
            return
        del delivery  # while the queue is empty nothing is held


def _next(jobs: "SimpleQueue[Delivery | None]", under_way: deque[Delivery]) -> Delivery | None:
    """A job to start if there is one, else the oldest to go on with, else whatever comes; None is the end."""
    with suppress(Empty):
        delivery = jobs.get(block=not under_way)
        if delivery is not None or not under_way:
            return delivery
        jobs.put(None)  # the end comes after what is under way
    return under_way.popleft()


def _give_up(error: BaseException, failed: list[Delivery], jobs: "SimpleQueue[Delivery | None]") -> None:
    """After an error the ranks are out of step: every job, also those to come, ends in it."""
    for delivery in failed:
        delivery.fail(error)
    del failed
    while (delivery := jobs.get()) is not None:
        delivery.fail(error)
