"""Run a reader's function on real ranks, with a deadline, and return its results or its failure.

A grader that looks at results alone passes a function that sends everything to every rank. With the messages
a check can also grade bytes, and which ranks talk to each other.
"""

import contextlib
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import zerolab
from zerolab.course import stopped
from zerolab.course.handles import into_one_buffer, into_what_is_sent, not_waited, used_early
from zerolab.course.messages import RETURNED, Message, own_place, place_in_ticket, read_trail
from zerolab.course.misfits import message_that_does_not_fit
from zerolab.course.printed import LINES_SHOWN, Brief, quiet
from zerolab.course.wire import Wire

SECONDS = 8.0  # until a reader's function counts as hanging
OTHERS_SECONDS = 0.5  # until the others have noted whom they address, if a rank addresses nobody


class Odd(NamedTuple):
    """What a function returned where a tensor was asked for, and the numbers in it if there are any."""

    kind: str
    text: str
    numbers: tuple[float, ...] = ()


@dataclass
class Attempt:
    """What came back from the ranks: a value and the messages of each, or the failure that stopped them.

    `calls`: the messages and the receives. `waits`: how often each rank waited on a handle.
    `engine`: whether the function used zerolab's own optimizer. `printed`: whether a rank printed anything.
    """

    values: list[Any] = field(default_factory=list)
    calls: list[list[Message]] = field(default_factory=list)
    failure: str | None = None
    engine: bool = False
    waits: list[int] = field(default_factory=list)
    printed: bool = False

    @property
    def nothing_returned(self) -> str:
        """What to say of a function that returned None in every case."""
        if self.printed:
            return (
                "your function prints something and returns None: return the result, because the check does "
                "not read what is printed"
            )
        return "not written yet: the function returned None"

    @property
    def messages(self) -> list[list[Message]]:
        """What each rank sent."""
        return [[call for call in calls if call.sent] for calls in self.calls]

    @property
    def collectives(self) -> list[str]:
        """The names of torch's own collectives that were called."""
        return sorted({m.call or m.op.strip("_") for sent in self.calls for m in sent if m.collective})

    def called(self, *names: str) -> list[str]:
        """Those of the functions `names`, such as ``ring.reduce_scatter``, that sent something."""
        used = {message.call for sent in self.calls for message in sent}
        return sorted(used.intersection(names))

    def unusable(self, instead: str, ring: bool = False) -> str | None:
        """Return why there is nothing to grade: a failure, a stub, or a call that does the exercise's work.

        The reader is to use `instead`; `ring`: and may use zerolab.ring.
        """
        nothing = all(value in (None, Odd("NoneType", "")) for value in map(_plain, self.values))
        if self.failure:
            return self.failure
        if not any(self.calls) and nothing:
            return "not written yet: nothing was sent and None was returned"
        if self.engine:
            return f"that uses zerolab's own ZeroOptimizer, which is what you write here: use {instead}"
        if self.collectives:
            return f"that calls torch's own {self.collectives[0]}, which does the work for you: use {instead}"
        used = sorted({m.call for own in self.calls for m in own if m.call.startswith("ring.")})
        if used and not ring:
            return f"that calls zerolab's own {used[0]}, which is what you write here: use {instead}"
        return self.unsound

    @property
    def unsound(self) -> str | None:
        """Messages that gloo lets pass: not waited for, or received into a tensor of another size."""
        return (
            into_one_buffer(self.calls)
            or into_what_is_sent(self.calls)
            or not_waited(self.calls, self.waits)
            or used_early(self.calls)
            or message_that_does_not_fit(self.calls)
        )

    @property
    def hint_of_calls(self) -> str | None:
        """A collective that explains wrong values: it leaves its result on one rank, or does not add."""
        for name in self.collectives:
            if name in ("dist.reduce", "dist.gather"):
                return f"{name} leaves its result on one rank only"
            if " with ReduceOp" in name:
                return f"it calls {name}, which is not the sum"
        return None

    def bytes_sent(self, rank: int) -> int:
        return sum(message.nbytes for message in self.messages[rank])


def attempt(fn: Callable, inputs: Sequence[tuple], timeout: float | None = None) -> Attempt:
    """Call fn(*inputs[rank]) on one process for each entry of `inputs` and return what came back.

    A function that raises or never returns has a result, too: `failure` describes it to the person who wrote
    the function. What the ranks print is shown, up to LINES_SHOWN lines; what they write to stderr is not.
    """
    size, seconds = len(inputs), timeout or SECONDS
    with tempfile.TemporaryDirectory(prefix="zerolab-check-") as folder, quiet():
        trails = [Path(folder, str(rank)) for rank in range(size)]
        try:
            results = zerolab.launch(_observe, size, fn, list(inputs), trails, timeout=seconds)
            values, calls, waits, engine, printed = zip(*results, strict=True)
            return Attempt(
                list(values), list(calls), engine=any(engine), waits=list(waits), printed=any(printed)
            )
        except zerolab.LaunchTimeout as error:
            notes = [read_trail(trail) for trail in trails]
            failure = stopped.never_ended(error, notes, seconds)
        except zerolab.WorkerError as error:
            notes = [read_trail(trail) for trail in trails]
            failure = stopped.ended_early(error, notes)
        except TypeError as error:  # the launcher's: it cannot send the function
            return Attempt(failure=stopped.cannot_travel(error, [fn, *inputs[0]]))
    return Attempt(calls=[[n for n in own if isinstance(n, Message)] for own in notes], failure=failure)


def _plain(value: Any) -> Any:
    """Return the value, or something that can be compared with None without a tensor's elementwise ==."""
    return ... if isinstance(value, torch.Tensor) else value


def returned(value: Any) -> torch.Tensor | Odd:
    """In the worker: a copy of a tensor, or a description of anything else, which can always be sent."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return value.detach().clone()  # a view would be sent with its whole storage
    if isinstance(value, torch.Tensor):
        return Odd(f"a tensor of layout {value.layout}", "")
    text = "" if value is None else repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}…"
    return Odd(type(value).__name__, text, _numbers_in(value))


def _numbers_in(value: Any) -> tuple[float, ...]:
    """Return the numbers of a list, an array or a tuple of tensors, one after the other."""
    parts = value if isinstance(value, list | tuple) else [value]
    try:
        return tuple(torch.cat([torch.as_tensor(each).double().flatten() for each in parts]).tolist())
    except (TypeError, ValueError, RuntimeError):
        return ()


def _observe(
    fn: Callable, inputs: list[tuple], trails: list[Path]
) -> tuple[Any, list[Message], int, bool, bool]:
    """In the worker: run fn on this rank's input and note its calls."""
    rank = dist.get_rank()
    uses_engine = _watch_engine()
    shown = Brief(sys.stdout, 10 * LINES_SHOWN)
    with Wire(trails[rank]) as wire, contextlib.redirect_stdout(shown):
        try:
            value = fn(*inputs[rank])
        except (Exception, SystemExit) as error:
            if wire.calls and wire.calls[-1].peer not in (None, *range(dist.get_world_size())):
                time.sleep(OTHERS_SECONDS)
            raise told(error) from None
    wire.note(wire.waits)
    wire.note(RETURNED)
    value = returned(value) if isinstance(value, torch.Tensor) or not _can_be_sent(value) else value
    return value, wire.calls, wire.waits, uses_engine(), shown.used


def _watch_engine() -> Callable[[], bool]:
    """In the worker: begin to watch for zerolab's own optimizer; returns whether one was built since.

    A function whose code has a name such as ``optimizer`` may bring the module with it, and not use it.
    """
    from zerolab.optimizer import ZeroOptimizer  # here: the reader's own process has no use for it

    built: list[bool] = []
    plain = ZeroOptimizer.__init__

    def noted(self, *args, **kwargs) -> None:
        built.append(True)
        plain(self, *args, **kwargs)

    ZeroOptimizer.__init__ = noted  # type: ignore[method-assign]  # this process ends with the attempt
    return lambda: bool(built)


def told(error: BaseException, where: object = "") -> stopped.Stopped:
    """In the worker: the error as the reader should read it, with the innermost line of the reader's own.

    `where`: the case in which it came, if a function is called with many.
    """
    if isinstance(error, stopped.Stopped):
        return error
    frames, trace = [], error.__traceback__
    while trace:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno, trace.tb_frame.f_code.co_name))
        trace = trace.tb_next
    place = own_place(reversed(frames)) or place_in_ticket(reversed(frames))
    text = f"{error}, with {where}" if where else str(error)
    return stopped.Stopped(type(error).__name__, text, str(place) if place else "")


def _can_be_sent(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
