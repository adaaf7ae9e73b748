"""Courier: a thread that carries one rank's collectives out while the main thread goes on computing.

To post a message takes longer than it looks: gloo copies what is sent under a lock that the next message
waits for. And a sum can be taken, or an all-reduce's second half begun, only when messages are in. So the
collectives are written as one would for a single thread, send, wait, add, and a thread runs them one after
another, in the order they were issued, which is then the order of every message on every rank.
"""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch


class Courier:
    """Runs jobs in the order they are handed over. The thread ends with its courier, and with the process."""

    def __init__(self):
        self._jobs: SimpleQueue[Delivery | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def carry(self, job: Callable[[], None]) -> "Delivery":
        """Have ``job`` run after those before it. To wait for it is to have its result, or its error."""
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

    def __init__(self, job: Callable[[], None]):
        self._job: Callable[[], None] | None = job
        self._done = threading.Event()
        self._error: BaseException | None = None

    def carry_out(self, failed: BaseException | None) -> BaseException | None:
        """Run the job, unless one before it ``failed``: the ranks are out of step then."""
        try:
            if failed is not None:
                raise failed
            self._job()
        except BaseException as error:
            self._error = error
        self._job = None  # it holds buffers
        self._done.set()
        return self._error

    def wait(self) -> None:
        """Wait until the job is done. Raises: what the job raised, or the first before it that failed."""
        self._done.wait()
        if self._error is not None:
            raise self._error


@torch.no_grad()
def _deliver(jobs: "SimpleQueue[Delivery | None]") -> None:
    failed = None
    while (delivery := jobs.get()) is not None:
        failed = delivery.carry_out(failed)
        del delivery  # while the queue is empty nothing is held
