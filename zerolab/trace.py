"""Trace: the events of a step, each with its slice, time, bytes and line of code.

Every collective that the engine issues, and every update, is recorded as one `Event`. Every total that the
package prints is a sum over events. This module does not import torch.
"""

import functools
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from zerolab.device_times import DeviceTimes, Mark
from zerolab.events import CONTROL, Event, Traffic
from zerolab.timeline import GPU_LANES, Phase, cpu_intervals, gpu_intervals, lanes, merge, save_timelines

__all__ = ["CONTROL", "Event", "Trace", "Traffic", "merge", "save_timelines"]

if TYPE_CHECKING:  # a trace is read without torch
    import torch


class Trace:
    """The events of the last few steps, and their traffic; older steps are forgotten, to stay small.

    Steps are counted from 0; what construction does happens in step -1.

    Attributes:
        phase: what the run is doing now. `enter` changes it.
        rank: whose trace it is.
        mark: makes a mark in the queue of the GPU that computes; None on a CPU.
    """

    def __init__(self, keep_steps: int = 4, clock: Callable[[], float] = time.perf_counter):
        self.step_number = -1
        self.rank = 0
        self.mark: Callable[[], Mark] | None = None
        self._wait: weakref.WeakMethod | None = None
        self._clock = clock
        self._steps: deque[tuple[int, list[Event]]] = deque([(-1, [])], maxlen=keep_steps + 1)
        self.phase = "setup"
        self._phases = deque([Phase(self.phase, clock())], maxlen=_PHASES * keep_steps)

    def wait_with(self, wait: Callable[[], None]) -> None:
        """Call this method, of an object that the trace does not keep alive, before events are read.

        Args: wait: waits for what goes on after its step, so that the events are complete.
        """
        self._wait = weakref.WeakMethod(wait)

    def _settle(self) -> None:
        if self._wait is not None and (wait := self._wait()) is not None:
            wait()

    def __getstate__(self) -> dict:
        self._settle()
        return vars(self) | {"_wait": None}

    def enter(self, phase: str) -> None:
        """The run begins to do something else."""
        self.phase = phase
        self._phases.append(Phase(phase, self._clock(), self.mark and self.mark()))

    @property
    def events(self) -> list[Event]:
        """All the events still remembered, oldest first."""
        self._settle()
        return [event for _, events in self._steps for event in events]

    def step(self, number: int) -> list[Event]:
        """Return the events of one step. Raises ValueError for a step that never was, or was forgotten."""
        self._settle()
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
        ranks: tuple[int, ...] = (),
    ) -> Event:
        """Write down that something starts on ``tensor``, and which line asked for it; `finish` it later."""
        event = Event(
            op, unit, phase or self.phase, self.step_number, logical_bytes, wire_bytes,
            _name_of(tensor.dtype), tuple(tensor.shape), tuple(slices), _caller(), self._clock(),
            ranks=ranks,
        )  # fmt: skip
        if self.mark is not None and event.phase != CONTROL:
            event.device = DeviceTimes(self.mark)
        self._steps[-1][1].append(event)
        return event

    def finish(self, event: Event) -> None:
        """Write down that it is done."""
        event.end = self._clock()
        if event.device is not None:
            cast(DeviceTimes, event.device).end()

    def traffic(self, step: int | None = None) -> Traffic:
        """Return the bytes of one step, by default the last one that has events and is not the setup."""
        if step is None:
            filled = [number for number, events in self._steps if events and number >= 0]
            step = filled[-1] if filled else -1
        total = Traffic()
        for event in self.step(step):
            total.add(event)
        return total

    def timeline(self) -> list[dict]:
        """Return the remembered steps as events of Chrome's trace format; timeline.py says what they show.

        On a GPU this waits for the device, so call it between steps.
        """
        phases, now = list(self._phases), self._clock()
        found = lanes(self.rank, 0, "", cpu_intervals(self.events, phases, now))
        if self.mark is not None:
            anchor = self.mark()
            anchor.synchronize()
            intervals = gpu_intervals(self.events, phases, self._clock(), anchor)
            found += lanes(self.rank, GPU_LANES, "GPU ", intervals)
        return found

    def save(self, path: str | Path) -> None:
        """Write `timeline` into a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

        Each rank writes its own, as in ``trace.save(f"trace-{trace.rank}.json")``; `merge` makes one of them.
        """
        save_timelines(path, [self.timeline()])

    def text(self) -> str:
        """Return the trace to be read: a heading a step, a line an event, and below it the slices it touched.

        On a GPU this waits for the device, to have its times.
        """
        self._settle()
        lines = []
        for number, events in self._steps:
            if events:
                lines.append("setup" if number < 0 else f"step {number}")
                lines.extend(f"  {event}" for event in events)
        return "\n".join(lines) + "\n"


_PHASES = 64  # a step has four; one with many micro-batches two for each
_PACKAGE = Path(__file__).parent
_shown: dict[str, str] = {}
_MESSENGERS = (str(_PACKAGE / "trace.py"), str(_PACKAGE / "collectives"))


@functools.cache
def _name_of(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


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
    """Return a file of this package from the package on, any other by its name."""
    ours = path.is_relative_to(_PACKAGE.parent)
    return path.relative_to(_PACKAGE.parent).as_posix() if ours else path.name
