"""CommThread: run one rank's collectives on a thread while the main thread computes.

Posting a message takes time: gloo copies what is sent, under a lock that the next message waits for. And a
sum can be computed, or the second half of an all-reduce begun, only when messages have arrived. So a
collective is written as a generator for a single thread to run: it posts its messages, yields, and waits for
them only when it is resumed. The thread starts every collective that has been submitted before it goes back
to wait for an earlier one, so the network always has the next messages: when collectives of 4.5 MB were run
one by one, they took twice as long.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple

import torch

Collective = Iterator[None]
"""It yields where it is about to wait for messages that it has posted."""


class Job(NamedTuple):
    """A collective that was submitted, and the future that its end or its error is reported to."""

    collective: Collective
    done: Future


class CommThread:
    """Starts collectives in the order they are submitted. The thread ends with this object or the process."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def submit(self, collective: Collective) -> Callable[[], None]:
        """Run ``collective`` after those before it. Returns a function that waits for its end.

        Raises: RuntimeError in a forked process, which has no such thread. From the function that is
            returned: what the collective raised, or the first before it that failed.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                "a process that was forked from a rank takes no part in the ranks' collectives. At stage 3 a "
                "forward needs them, and so does full_params(): copy the parameters that the process reads "
                "before it is forked, inside full_params(), or take stage 2"
            )
        if self._thread is None:
            # A daemon thread: when it waits for a rank that is gone, it must not keep the process alive.
            self._thread = threading.Thread(target=_run, args=(self._jobs,), daemon=True, name="collectives")
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        done: Future[None] = Future()
        self._jobs.put(Job(collective, done))
        return done.result


@torch.no_grad()
def _run(jobs: "SimpleQueue[Job | None]") -> None:
    """The thread: start every job that has come, then resume the oldest; and so on.

    The oldest keeps its place while it goes through its rounds of messages. If younger jobs came in between,
    a rank could wait for one that another rank has not submitted yet, and that rank for the oldest one here.
    """
    started: deque[Job] = deque()
    try:
        while _start_new(jobs, started):
            if not _advance(started[0]):
                started.popleft()
    except BaseException as error:
        _fail_all(error, started, jobs)


def _start_new(jobs: "SimpleQueue[Job | None]", started: deque[Job]) -> bool:
    """Start what has come; wait for a job where none is started. False when all is done and no more comes."""
    while not started or not jobs.empty():
        job = jobs.get()
        if job is None:
            jobs.put(None)  # the end comes after what was started
            return bool(started)
        started.append(job)
        if not _advance(job):
            started.pop()
        del job  # it holds buffers, and the next job may be long in coming
    return True


def _advance(job: Job) -> bool:
    """Run the job until it waits again; whether it has more to do."""
    try:
        next(job.collective)
        return True
    except StopIteration:
        job.done.set_result(None)
        return False


def _fail_all(error: BaseException, failed: deque[Job], jobs: "SimpleQueue[Job | None]") -> None:
    """After an error the ranks are out of step: report it to every job, also to those still to come."""
    while failed:
        failed.popleft().done.set_exception(error)
    while (job := jobs.get()) is not None:
        job.done.set_exception(error)
        del job
