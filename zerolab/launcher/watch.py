"""Watch one launch from the caller's process: start, listen, decide, stop, clean up."""

import contextlib
import io
import logging
import os
import pickle
import selectors
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from zerolab.launcher import protocol, stacks
from zerolab.launcher.failures import (
    ABORTED,
    KILLED,
    Failure,
    LaunchTimeout,
    WorkerError,
    first_cause,
    name_ranks,
    worker_error,
)
from zerolab.launcher.forkclient import ForkServer
from zerolab.launcher.output import Relay
from zerolab.launcher.protocol import EVENT, Event, Job

START_SECONDS = 60.0  # for the fork server to import torch; a launch's own timeout starts when its ranks do
GRACE_SECONDS = 0.3  # after a failure, for one that came before it and is reported after it
PEER_GRACE_SECONDS = 3.0  # while all that is reported may come from a peer that went away
STOP_SECONDS = 1.0  # from asking a rank to end to killing it
KILLED_SECONDS = 30.0  # from killing it to its end: the driver of a GPU first frees what it held there
DUMP_SECONDS = 4.0  # for the ranks to write their stacks, however busy the machine
LOOK_SECONDS = 0.1

log = logging.getLogger("zerolab")


class Launch:
    """A context: the ranks run inside it, and none is left outside it."""

    def __init__(self, server: ForkServer, job: Job, payload: bytes, timeout: float | None) -> None:
        self.server, self.job, self.payload = server, job, payload
        self.timeout = float("inf") if timeout is None else timeout
        self.world_size = job["world_size"]
        self.number = server.next_number()
        self.running: set[int] = set()  # ranks whose process exists, or is about to
        self.done: set[int] = set()
        self.failures: dict[int, Failure] = {}
        self.trouble = ""  # an error that is no rank's
        self.deadline = time.monotonic() + self.timeout + START_SECONDS
        self.relays: tuple[Relay, ...] = ()
        self.selector = selectors.DefaultSelector()
        self.cleanup = contextlib.ExitStack()

    def __enter__(self) -> "Launch":
        try:
            self.start()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        with self.cleanup, interrupts_ignored():
            if self.running:
                self.stop(politely=exception[0] is not None)
            self.show_output(end_lines=exception[0] is not None)

    def start(self) -> None:
        """Write the job down, open the pipes, ask for the ranks."""
        self.cleanup.callback(self.selector.close)
        self.directory = tempfile.mkdtemp(prefix="zerolab-")
        self.cleanup.callback(shutil.rmtree, self.directory, ignore_errors=True)
        for name, content in ((protocol.JOB, pickle.dumps(self.job)), (protocol.PAYLOAD, self.payload)):
            with open(protocol.path(self.directory, name), "wb") as file:
                file.write(content)
        self.events, their_events = self.pipe()
        their_lifeline, self.lifeline = self.pipe()
        stdout, their_stdout = self.pipe()
        stderr, their_stderr = self.pipe()
        self.relays = (Relay(stdout, "stdout"), Relay(stderr, "stderr"))
        self.watch(self.events, self.receive)
        self.selector.register(self.server.socket, selectors.EVENT_READ, self.server_died)
        for relay in self.relays:
            self.watch(relay.source, relay.pass_on)
        theirs = (their_events, their_lifeline, their_stdout, their_stderr)
        self.running = set(range(self.world_size))
        self.server.launch(self.number, self.world_size, self.directory, [end.fileno() for end in theirs])
        for end in theirs:
            end.close()

    def pipe(self) -> tuple[io.FileIO, io.FileIO]:
        """Return a pipe whose ends are closed with this launch, if not before."""
        read, write = os.pipe()
        enter = self.cleanup.enter_context
        return enter(open(read, "rb", buffering=0)), enter(open(write, "wb", buffering=0))

    def watch(self, source: Any, callback: Callable[[], bool]) -> None:
        """Have `callback` called whenever `source` can be read; it returns False to be called no more."""
        os.set_blocking(source.fileno(), False)
        self.selector.register(source, selectors.EVENT_READ, callback)

    def open_file(self, name: str, rank: int) -> io.BufferedReader:
        """Return a file that a rank wrote."""
        return open(protocol.path(self.directory, name, rank), "rb")

    def results(self) -> list[Any]:
        """Return what the ranks returned, by rank, once all have; or the error that says why not."""
        if not self.listen(lambda: self.trouble or self.failures or len(self.done) == self.world_size):
            raise self.timed_out()
        if self.failures:
            raise self.failed()
        if self.trouble:
            raise RuntimeError(self.trouble)
        return [self.result(rank) for rank in range(self.world_size)]

    def listen(self, until: Callable[[], Any], seconds: float | None = None) -> bool:
        """Handle what happens until `until()` is true; False if `seconds`, or the deadline, pass first."""
        end = None if seconds is None else time.monotonic() + seconds
        while not until():
            left = (self.deadline if end is None else end) - time.monotonic()
            if left <= 0:
                return False
            for key, _ in self.selector.select(None if left == float("inf") else left):
                if not key.data():
                    self.selector.unregister(key.fileobj)
        return True

    def receive(self) -> bool:
        """Events of our ranks; the pipe ends when the last process that could write to it is gone."""
        data = self.events.read(EVENT.size * 128)
        if not data:
            self.running.clear()
            return False
        for event in map(Event._make, EVENT.iter_unpack(data)):
            self.handle(event)
        return True

    def handle(self, event: Event) -> None:
        """Note one event."""
        if event.kind == protocol.STARTED:
            self.deadline = event.time + self.timeout
        elif event.kind == protocol.NOT_STARTED:
            self.running = set(range(event.rank))
            reason = f"{os.strerror(event.value)}; ask for fewer ranks, or raise the limit (ulimit -u)"
            self.trouble = f"the system refused process {event.rank + 1} of {self.world_size}: {reason}"
        elif event.kind == protocol.DONE:
            self.done.add(event.rank)
        elif event.kind == protocol.FAILED:
            self.failures[event.rank] = Failure(event.rank, event.time, **self.report(event.rank))
        elif event.kind == protocol.DIED:
            self.running.discard(event.rank)
            if event.rank not in self.done | self.failures.keys():
                self.failures[event.rank] = Failure(event.rank, event.time, exitcode=event.value)

    def report(self, rank: int) -> dict[str, Any]:
        """Return what a rank has written of its exception; where it could not be written, that."""
        try:
            with self.open_file(protocol.FAILURE, rank) as file:
                return pickle.load(file)
        except (OSError, EOFError, pickle.UnpicklingError):
            return {
                "summary": f"it raised an exception, which could not be written to {self.directory}: make "
                "room there, or set TMPDIR to another folder"
            }

    def server_died(self) -> bool:
        """The server never writes, so its socket can be read only when it is gone."""
        self.trouble = "the process that starts ranks was killed; launch again, which starts a new one"
        return False

    def failed(self) -> WorkerError:
        """The error of the rank that failed first; a moment is left for failures that are reported late."""
        everyone = lambda: len(self.failures) + len(self.done) == self.world_size
        self.listen(lambda: self.cause.severity == KILLED or everyone(), GRACE_SECONDS)
        self.listen(lambda: self.cause.severity < ABORTED or everyone(), PEER_GRACE_SECONDS)
        stack = stacks.render(stacks.main_thread(stacks.parse(self.dump(self.cause.rank))))
        return worker_error(self.cause, self.done, stack)

    @property
    def cause(self) -> Failure:
        """The first cause among the failures known so far."""
        return first_cause(list(self.failures.values()))

    def timed_out(self) -> LaunchTimeout:
        """The error that names the ranks that reached no collective, with the stacks of all."""
        waiting = sorted(self.running - self.done)
        for rank in waiting:
            self.server.signal(self.number, rank, protocol.DUMP_SIGNAL)
        end = time.monotonic() + DUMP_SECONDS
        while time.monotonic() < end and not all(stacks.complete(self.dump(rank)) for rank in waiting):
            self.listen(lambda: False, LOOK_SECONDS)
        found = {rank: stacks.parse(self.dump(rank)) for rank in waiting}
        return stacks.timeout_error(self.timeout, found, self.done)

    def dump(self, rank: int) -> str:
        """Return what faulthandler wrote in a rank, on request or in a crash."""
        with contextlib.suppress(FileNotFoundError), self.open_file(protocol.STACKS, rank) as file:
            return file.read().decode(errors="replace")
        return ""

    def result(self, rank: int) -> Any:
        """Return what a rank returned, rebuilt here."""
        try:
            with self.open_file(protocol.RESULT, rank) as file:
                return pickle.load(file)
        except Exception as error:
            raise WorkerError(f"rank {rank}'s result cannot be rebuilt here: {error}", rank) from error

    def stop(self, politely: bool) -> None:
        """End every rank: by SIGTERM if it still works, else by closing the lifeline; then by SIGKILL."""
        gone = lambda: not self.running
        if politely and not self.trouble:
            self.signal_all(signal.SIGTERM)
        else:
            self.lifeline.close()
        if not self.listen(gone, STOP_SECONDS):
            self.signal_all(signal.SIGKILL)
            self.lifeline.close()
            if not self.listen(gone, KILLED_SECONDS):
                ranks = name_ranks(self.running)
                log.warning(
                    "%s had not ended %g seconds after SIGKILL; wait until they have ended",
                    ranks,
                    KILLED_SECONDS,
                )

    def signal_all(self, number: int) -> None:
        """Signal every rank that still runs."""
        for rank in self.running:
            self.server.signal(self.number, rank, number)

    def show_output(self, end_lines: bool) -> None:
        """The rest of rank 0's output, then the other ranks' in their order; an error begins its own line."""
        for relay in self.relays:
            relay.drain(end_lines)
        for rank in range(1, self.world_size if self.relays else 1):
            for name in (protocol.STDOUT, protocol.STDERR):
                with contextlib.suppress(FileNotFoundError), self.open_file(name, rank) as file:
                    Relay(file, name).drain(end_lines)


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl-C, so that a second one does not leave ranks running."""
    previous = signal.getsignal(signal.SIGINT)
    if previous is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
