"""Trace: what happened in a step, to which slice, when, how many bytes, and which line did it.

A number that nobody can trace to an event is a claim. Every collective the engine issues, and every update,
leaves one `Event` here, and every total the package prints is a sum over events. This module knows nothing of
torch.
"""

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a trace is read without torch
    import torch

CONTROL = "control"
"""The phase of small messages that carry no tensor of the model: masks, norms, agreements. Counted apart."""


@dataclass(slots=True)
class Event:
    """One collective or one update, as one rank saw it.

    ``logical_bytes`` is the payload in the paper's convention (an all-reduce counts its payload twice);
    ``wire_bytes`` is what this rank sent, summed over the messages it handed to the network, and
    ``control_bytes`` what it sent to announce them.
    ``slices`` names what was touched, as ``"blocks.0.weight[0:3936]"``.
    """

    op: str
    unit: str
    phase: str
    step: int
    logical_bytes: int
    wire_bytes: int
    dtype: str
    shape: tuple[int, ...]
    slices: tuple[str, ...]
    where: str
    start: float
    end: float | None = None
    control_bytes: int = 0

    @property
    def seconds(self) -> float | None:
        """How long it was under way; None while it still is."""
        return None if self.end is None else self.end - self.start

    def __str__(self) -> str:
        took = "  in flight" if self.seconds is None else f"{self.seconds * 1e3:8.3f} ms"
        sizes = f"logical {self.logical_bytes:>10,} B  wire {self.wire_bytes:>10,} B"
        head = (
            f"{self.phase:<8} {self.op:<14} {self.unit:<12} {self.dtype:<8} {self.shape!s:<10} {sizes} {took}"
        )
        touched = "".join(f"\n           {piece}" for piece in self.slices)
        return f"{head}  {self.where}{touched}"


@dataclass
class Traffic:
    """Bytes one rank sent, in all and by operation; control messages stand apart and are not in the sums."""

    logical_bytes: int = 0
    wire_bytes: int = 0
    control_bytes: int = 0
    by_op: dict[str, "Traffic"] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Count one event, once in all and once under its operation."""
        if event.phase == CONTROL:
            self.control_bytes += event.wire_bytes
            return
        self.control_bytes += event.control_bytes
        self.logical_bytes += event.logical_bytes
        self.wire_bytes += event.wire_bytes
        if event.op != "update":
            op = self.by_op.setdefault(event.op, Traffic())
            op.logical_bytes += event.logical_bytes
            op.wire_bytes += event.wire_bytes


class Trace:
    """The events of the last few steps, and their traffic; older steps are forgotten, to stay small.

    Steps are counted from 0; what construction does happens in step -1.

    Attributes:
        phase: what the run is doing now. `enter` changes it.
        rank: whose trace it is.
    """

    def __init__(self, keep_steps: int = 4, clock: Callable[[], float] = time.perf_counter):
        self.step_number = -1
        self.rank = 0
        self._clock = clock
        self._steps: deque[tuple[int, list[Event]]] = deque([(-1, [])], maxlen=keep_steps + 1)
        self.phase = "setup"
        self._phases: deque[tuple[str, float]] = deque([(self.phase, clock())], maxlen=_PHASES * keep_steps)

    def enter(self, phase: str) -> None:
        """The run begins to do something else."""
        self.phase = phase
        self._phases.append((phase, self._clock()))

    @property
    def events(self) -> list[Event]:
        """All the events still remembered, oldest first."""
        return [event for _, events in self._steps for event in events]

    def step(self, number: int) -> list[Event]:
        """The events of one step. Raises ValueError for a step that never was, or was forgotten."""
        for remembered, events in self._steps:
            if remembered == number:
                return list(events)
        known = [remembered for remembered, _ in self._steps]
        raise ValueError(
            f"step {number} is not in this trace, which remembers steps {known}; build Trace(keep_steps=...)"
        )

    def next_step(self) -> None:
        """Close the step under way and open the next."""
        self.step_number += 1
        self._steps.append((self.step_number, []))

    def begin(
        self,
        op: str,
        unit: str,
        tensor: "torch.Tensor",
        slices: Iterable[str] = (),
        *,
        logical_bytes: int = 0,
        wire_bytes: int = 0,
        phase: str | None = None,
    ) -> Event:
        """Write down that something starts on ``tensor``, and which line asked for it; `finish` it later."""
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        event = Event(
            op, unit, phase or self.phase, self.step_number, logical_bytes, wire_bytes, dtype, shape,
            tuple(slices), _caller(), self._clock(),
        )  # fmt: skip
        self._steps[-1][1].append(event)
        return event

    def finish(self, event: Event) -> None:
        """Write down that it is done."""
        event.end = self._clock()

    def traffic(self, step: int | None = None) -> Traffic:
        """The bytes of one step, by default the last one that has events and is not the setup."""
        if step is None:
            filled = [number for number, events in self._steps if events and number >= 0]
            step = filled[-1] if filled else -1
        total = Traffic()
        for event in self.step(step):
            total.add(event)
        return total

    def timeline(self) -> list[dict]:
        """The remembered steps as events of Chrome's trace format, in microseconds.

        A rank is a process. One lane has its phases and updates; the others have its communication, as many
        as there were collectives under way at once.
        """
        events = sorted((event for event in self.events if event.end), key=lambda event: event.start)
        first, now = events[0].start if events else 0.0, self._clock()
        stops = [start for _, start in list(self._phases)[1:]] + [now]
        found = [_lane(self.rank, 0, "compute")]
        for (phase, start), stop in zip(self._phases, stops, strict=True):
            if stop > first:
                found.append(_span(self.rank, 0, phase, max(start, first), stop))
        free = [now]  # when each lane is free; the first has the phases
        for event in events:
            end, lane = event.end or now, 0
            if event.op != "update":
                lane = next((n for n, until in enumerate(free) if n and until <= event.start), len(free))
                if lane == len(free):
                    found.append(_lane(self.rank, lane, "communication"))
                    free.append(now)
                free[lane] = end
            name = f"{event.op} {event.unit}"
            found.append(_span(self.rank, lane, name, event.start, end) | {"args": _details(event)})
        return found

    def save(self, path: str | Path) -> None:
        """Write `timeline` into a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

        Each rank writes its own, as in ``trace.save(f"trace-{trace.rank}.json")``; `merge` makes one of them.
        """
        save_timelines(path, [self.timeline()])

    def text(self) -> str:
        """The trace to be read: a heading a step, a line an event, and below it the slices it touched."""
        lines = []
        for number, events in self._steps:
            if events:
                lines.append("setup" if number < 0 else f"step {number}")
                lines.extend(f"  {event}" for event in events)
        return "\n".join(lines) + "\n"


def save_timelines(path: str | Path, timelines: Iterable[list[dict]]) -> None:
    """Write the timelines of several ranks into one file."""
    events = [event for timeline in timelines for event in timeline]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n", "utf-8")


def merge(paths: Iterable[str | Path], path: str | Path) -> None:
    """Make one file of those that several ranks of one host have written: their clocks are the same."""
    save_timelines(path, [json.loads(Path(each).read_text("utf-8"))["traceEvents"] for each in paths])


def _lane(rank: int, lane: int, name: str) -> dict:
    return {
        "ph": "M",
        "name": "thread_name",
        "pid": rank,
        "tid": lane,
        "args": {"name": f"rank {rank}: {name}"},
    }


def _span(rank: int, lane: int, name: str, start: float, stop: float) -> dict:
    times = {"ts": start * 1e6, "dur": (stop - start) * 1e6}
    return {"ph": "X", "name": name, "pid": rank, "tid": lane, **times}


def _details(event: Event) -> dict:
    names = ("phase", "step", "logical_bytes", "wire_bytes", "dtype", "slices", "where")
    return {name: getattr(event, name) for name in names} | {"shape": list(event.shape)}


_PHASES = 64  # a step has four; one with many micro-batches two for each
_PACKAGE = Path(__file__).parent
_shown: dict[str, str] = {}
_MESSENGERS = (str(_PACKAGE / "trace.py"), str(_PACKAGE / "collectives"))


def _caller() -> str:
    """The file and line that asked for the event: the nearest frame outside this file and collectives."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_MESSENGERS):
        frame = frame.f_back
    file = frame.f_code.co_filename
    if file not in _shown:  # paths are slow, and there are few
        _shown[file] = _shorten(Path(file))
    return f"{_shown[file]}:{frame.f_lineno}"


def _shorten(path: Path) -> str:
    """A file of this package from the package on, any other by its name."""
    ours = path.is_relative_to(_PACKAGE.parent)
    return path.relative_to(_PACKAGE.parent).as_posix() if ours else path.name
