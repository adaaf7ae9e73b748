"""DeviceTimes: measure when the GPU ran an event, not when the CPU queued it.

A call that computes or communicates on a GPU returns as soon as the work is queued, so the CPU's clock does
not show how long it takes. Marks read the GPU's own clock: they are timing events in its queue, which record
the time when the GPU reaches them. They are read only if the times are read, so no step waits for them.
This module does not import torch: `zerolab.devices.timing_mark` makes the marks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self


class Mark(Protocol):
    """A place in a GPU's queue, as torch.cuda.Event(enable_timing=True) is one."""

    def synchronize(self) -> None:
        """Wait until the GPU has come to this place."""

    def elapsed_time(self, end_event: Self) -> float:
        """The milliseconds from here to a later mark."""


@dataclass(frozen=True)
class Measured:
    """Times that were read.

    Attributes: total_ms: how long the work took. exposed_ms: how long the computation waited for it.
    """

    total_ms: float | None
    exposed_ms: float


class DeviceTimes:
    """The marks of one event: where it was issued, before and after each wait for it, and at its end.

    Each is made on the stream that computes. What happened between two marks of a wait is exposed time: the
    GPU had nothing to do but wait. A copy of this object has the times instead of the marks.

    Attributes: started, ended: the first mark and the last; waits: the marks before and after each wait.
    """

    def __init__(self, mark: Callable[[], Mark]):
        self._mark = mark
        self.started = mark()
        self.ended: Mark | None = None
        self.waits: list[tuple[Mark, Mark]] = []
        self._durations: list[Callable[[], float]] = []

    def around(self, wait: Callable[[], object], duration: Callable[[], float] | None) -> Callable[[], None]:
        """``wait`` with a mark before it and one after it.

        ``duration`` gives the milliseconds that the collective itself took, where the library knows them.
        """
        if duration is not None:
            self._durations.append(duration)

        def wait_between_marks() -> None:
            before = self._mark()
            wait()
            self.waits.append((before, self._mark()))

        return wait_between_marks

    def end(self) -> None:
        """The event is over: a collective at its last wait, anything else where the queue is now."""
        self.ended = self.waits[-1][1] if self.waits else self._mark()

    @property
    def total_ms(self) -> float | None:
        """How long the work took; None while it is not over. The first reading waits for the GPU.

        Where the library does not know it, this is the time from the issue to the end of the last wait: the
        most that it can be.
        """
        if self.ended is None:
            return None
        self.ended.synchronize()
        if self._durations:
            return sum(duration() for duration in self._durations)
        return self.started.elapsed_time(self.ended)

    @property
    def exposed_ms(self) -> float:
        """How long the computation waited for it so far."""
        if self.waits:
            self.waits[-1][1].synchronize()
        return sum(before.elapsed_time(after) for before, after in self.waits)

    def __reduce__(self) -> tuple:
        return (Measured, (self.total_ms, self.exposed_ms))
