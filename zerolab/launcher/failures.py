"""The errors that a launch raises, and the choice of the rank that caused the failure.

When one rank of a job dies the others fail too, each with a complaint about its peer. The useful error is the
first cause, so deaths by signal come before everything else and complaints about a peer come last. SIGABRT
comes just before those, because NCCL's watchdog aborts a healthy rank whose peer is gone. An exception's
``raised_on`` names the rank where it began: on every other rank it is a complaint about that peer.
"""

import pickle
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

# What torch, gloo and NCCL say on a rank whose peer went away.
_PEER_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|closed by peer|"
    r"remote (worker|process exited)|socket (closed|error|timeout)|peer (closed|disconnected)|"
    r"NCCL error|ncclRemoteError",
    re.IGNORECASE,
)


KILLED, RAISED, ABORTED, LOST_A_PEER = range(4)  # how grave a failure is: the gravest is the cause


class WorkerError(RuntimeError):
    """A rank of a launch failed; the message holds the rank, the reason and the rank's own traceback.

    `rank`: which one. `exitcode`: how its process ended, where it ended itself (negative: killed by that
    signal). ``__cause__`` is the rank's own exception, where it could be rebuilt here."""

    def __init__(self, message: str, rank: int, exitcode: int | None = None) -> None:
        super().__init__(message, rank, exitcode)
        self.message, self.rank, self.exitcode = message, rank, exitcode

    def __str__(self) -> str:
        return self.message


class LaunchTimeout(TimeoutError):
    """A launch passed its deadline; `ranks` are those that were outside a collective, the likely culprits.

    `stacks`: by rank, where each that had not returned was: (file, line, function), innermost first.
    """

    def __init__(
        self,
        message: str,
        ranks: tuple[int, ...] = (),
        stacks: Mapping[int, Sequence[tuple[str, int, str]]] | None = None,
    ) -> None:
        super().__init__(message, ranks)
        self.message, self.ranks, self.stacks = message, ranks, stacks or {}

    def __str__(self) -> str:
        return self.message


class Failure(NamedTuple):
    """One rank's end other than by returning."""

    rank: int
    time: float
    exitcode: int | None = None  # None: it raised
    summary: str = ""  # the exception's last line
    traceback: str = ""
    pickled: bytes | None = None  # the exception itself
    raised_on: int | None = None  # the rank that told this one of its error

    def exception(self) -> BaseException | None:
        """Return the rank's exception itself, where its class can be rebuilt in this process."""
        try:
            return pickle.loads(self.pickled) if self.pickled else None
        except Exception:
            return None

    @property
    def severity(self) -> int:
        """KILLED, RAISED (or ended itself), ABORTED or LOST_A_PEER; the lower, the graver."""
        if self.exitcode is None:
            passed_on = self.raised_on not in (None, self.rank)
            return LOST_A_PEER if passed_on or _PEER_LOST.search(self.summary) else RAISED
        if self.exitcode == -signal.SIGABRT:
            return ABORTED
        return KILLED if self.exitcode < 0 else RAISED

    def describe(self) -> str:
        """Return one sentence: what became of the rank."""
        if self.exitcode is None:
            return f"rank {self.rank} failed: {self.summary}"
        if self.exitcode < 0:
            name = signal.Signals(-self.exitcode).name if -self.exitcode in set(signal.Signals) else "?"
            hint = "; the system does this when memory runs out" if name == "SIGKILL" else ""
            return f"rank {self.rank} was killed by signal {-self.exitcode} ({name}{hint})"
        return (
            f"rank {self.rank} exited with code {self.exitcode} before its function returned "
            "(os._exit, or a library that ends the process)"
        )


def first_cause(failures: list[Failure]) -> Failure:
    """Return the failure to report: the earliest of the gravest kind."""
    return min(failures, key=lambda failure: (failure.severity, failure.time))


def worker_error(cause: Failure, done: set[int], stack: str) -> WorkerError:
    """The error to raise for the first cause; `stack` is what the rank's crash handler wrote, if it did."""
    parts = [cause.describe()]
    if cause.severity == LOST_A_PEER and done:
        parts[0] = (
            f"rank {cause.rank} failed: it waited for a message of {name_ranks(done)}, which had returned by "
            "then. Every rank must make as many passes, steps, saves and other collectives as the others. In "
            f"its own words: {cause.summary}"
        )
    if stack:
        parts.append(f"its stack (most recent call last):\n{stack}")
    if cause.traceback:
        parts.append(cause.traceback)
    error = WorkerError("\n\n".join(parts), cause.rank, cause.exitcode)
    error.__cause__ = cause.exception()
    return error


def name_ranks(ranks: Iterable[int]) -> str:
    """For a sentence: "rank 2", or "ranks 0, 1"."""
    ordered = sorted(ranks)
    return f"rank{'s' if len(ordered) > 1 else ''} {', '.join(map(str, ordered))}"
