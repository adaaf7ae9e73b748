"""Explain why a reader's function did not end on all ranks: it raised, died, or waits for a message.

The evidence is what each rank had called by then. gloo's own message is not shown, because it names sockets,
and the reader's code has sends.
"""

import inspect
import re
import signal
from collections.abc import Sequence
from typing import Any

from zerolab import LaunchTimeout, WorkerError
from zerolab.course.handles import given_up, into_one_buffer, into_what_is_sent, left_behind, used_early
from zerolab.course.messages import Calls, Message, Notes, at, last_place, of_messages, own_place
from zerolab.course.misfits import message_that_does_not_fit
from zerolab.course.peers import to_nobody
from zerolab.course.waits import BATCH, unmatched
from zerolab.course.wording import count, shortened
from zerolab.launcher.payload import pickle_payload

# What gloo and torch say where a message does not fit or a peer is gone.
_OF_GLOO = re.compile(r"gloo|enforce fail|preamble|closed by peer|connection|timed out waiting", re.I)
_IN_PLACE = {f"{module}.{name}" for module in ("dist", "ring") for name in ("all_gather", "all_reduce")}
_IN_PLACE |= {"dist.all_gather_into_tensor", "dist.reduce_scatter_tensor", "dist.broadcast", "dist.reduce"}
_FRAME = re.compile(r'^  File "(.*)", line (\d+), in (.*)$', re.MULTILINE)
_DIED = {
    "SIGSEGV": "it read or wrote memory that does not belong to it, as happens with a tensor whose storage "
    "was freed or resized, or with a wrong address",
    "SIGBUS": "it read or wrote memory that is not there",
    "SIGABRT": "a library in C++ gave up, after an error of its own",
    "SIGKILL": "the system does so where memory runs out",
}


class Stopped(RuntimeError):
    """An exception of the reader's function, in words that can always be sent to another process."""

    def __init__(self, kind: str, text: str, place: str):
        super().__init__(kind, text, place)
        self.kind, self.text, self.place = kind, text, place


def ended_early(error: WorkerError, notes: Notes) -> str:
    """Explain a rank that raised, exited, or was killed."""
    if found := to_nobody(of_messages(notes)):
        return found
    if error.exitcode is not None and error.exitcode < 0 and error.exitcode != -signal.SIGABRT:
        return _killed(error, notes)
    raised = error.__cause__ if isinstance(error.__cause__, Stopped) else None
    of_gloo = raised is None or bool(_OF_GLOO.search(raised.text))
    if of_gloo and (found := _of_messages_that_failed(notes)):
        return found
    if raised and not of_gloo:
        if raised.kind == "SystemExit":
            return f"rank {error.rank} called sys.exit: return a value instead{at(raised.place)}"
        return _raised(error.rank, raised, of_messages(notes))
    if raised:
        return f"rank {error.rank} lost the rank that it exchanged a message with{at(raised.place)}"
    if error.exitcode == -signal.SIGABRT:
        return _killed(error, notes)
    if error.exitcode is not None:
        return f"rank {error.rank} ended its own process, as os._exit does: return a value instead"
    return f"rank {error.rank} stopped: {str(error).splitlines()[0]}"


def _raised(rank: int | None, raised: Stopped, calls: Calls) -> str:
    """Say what a rank raised. Where sizes did not agree, a message that did not fit comes before that."""
    text, *more = map(str.strip, raised.text.strip().splitlines() or [""])
    if more and more[0].startswith("but got"):  # torch tells in a second line what it was given
        text = f"{text} {more[0]}"
    said = f"rank {rank} stopped with {raised.kind}: {shortened(text, 300)}{at(raised.place)}"
    misfit = message_that_does_not_fit(calls) if "size" in text or "shape" in text else None
    return f"{misfit}. So {said}" if misfit else said + _returned_none(rank, text, calls)


def _returned_none(rank: int | None, text: str, calls: Calls) -> str:
    """Name a call that returns None, where the error says that something is None."""
    own = calls[rank] if rank is not None else []
    in_place = [call.call for call in own if call.call in _IN_PLACE and not (call.started or call.functional)]
    if "NoneType" not in text or not in_place:
        return ""
    return f". Is it what {in_place[-1]} returned? It returns None, and leaves its result in its argument"


def _of_messages_that_failed(notes: Notes) -> str | None:
    calls = of_messages(notes)
    return (
        into_one_buffer(calls)
        or into_what_is_sent(calls)
        or left_behind(notes)
        or used_early(calls)
        or message_that_does_not_fit(calls)
        or given_up(notes)
        or unmatched(notes)
    )


def _killed(error: WorkerError, notes: Notes) -> str:
    """Explain a process that a signal ended. Its stack, where there is one, has the reader's line."""
    name = signal.Signals(-error.exitcode).name if error.exitcode else ""
    stack = [(file, int(line), function) for file, line, function in _FRAME.findall(str(error))]
    place = own_place(reversed(stack)) or last_place(notes, error.rank)
    why = f": {_DIED[name]}" if name in _DIED else ""
    return f"rank {error.rank}'s process was killed by signal {name}{why}{at(place)}"


def never_ended(error: LaunchTimeout, notes: Notes, seconds: float) -> str:
    """The deadline passed: some rank computes for ever, or all that are left wait for each other."""
    after = f"after {seconds:g} s"
    if found := to_nobody(of_messages(notes)):
        return found
    if error.ranks:
        rank = error.ranks[0]
        place = own_place(error.stacks.get(rank, ()))
        return (
            f"{after} rank {rank} was still computing, not waiting: an endless loop?{at(place)}"
            f"{_calls_before(of_messages(notes)[rank])}"
        )
    found = _of_messages_that_failed(notes)
    return f"deadlock: {after} {found or f'all ranks wait for each other. Start messages with {BATCH}'}"


def _calls_before(own: Sequence[Message]) -> str:
    if not own or not own[-1].call:
        return ""
    return f". It had made {count(len(own), 'call')} before. The last one was {own[-1].call}"


def cannot_travel(error: TypeError, functions: Sequence[Any]) -> str:
    """The launcher could not pickle the call; ask again about each function alone, to name what it uses."""
    for function in filter(inspect.isfunction, functions):
        try:
            pickle_payload(function, (), {})
        except TypeError as alone:
            error = alone
    what = str(error).partition(" (")[0].removeprefix("launch cannot send ")
    return f"your answer cannot be sent to the ranks, because of {what}: create it inside the function"
