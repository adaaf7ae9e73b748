"""Explain why a reader's function did not end on all ranks: it raised, died, or waits for a message.

The evidence is what each rank had called by then. gloo's own message is not shown, because it names sockets,
and the reader's code has sends.
"""

import inspect
import re
import signal
from collections import Counter
from collections.abc import Sequence
from typing import Any

from zerolab import LaunchTimeout, WorkerError
from zerolab.course.handles import into_one_buffer, left_behind
from zerolab.course.wire import RETURNED, Message, Notes, own_place
from zerolab.launcher.payload import pickle_payload

# What gloo and torch say where a message does not fit or a peer is gone.
_OF_GLOO = re.compile(r"gloo|enforce fail|preamble|closed by peer|connection|timed out waiting", re.I)
_FRAME = re.compile(r'^  File "(.*)", line (\d+), in (.*)$', re.MULTILINE)
_DIED = {
    "SIGSEGV": "it read or wrote memory that does not belong to it, as happens with a tensor whose storage "
    "was freed or resized, or with a wrong address",
    "SIGBUS": "it read or wrote memory that is not there",
    "SIGABRT": "a library in C++ gave up, after an error of its own",
    "SIGKILL": "the system does so where memory runs out",
}
_BATCH = "Let one of two ranks receive first, or start both with dist.batch_isend_irecv and wait for them"


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
            return f"rank {error.rank} called sys.exit: return a value instead{_at(raised.place)}"
        text = raised.text.strip().splitlines() or [""]
        return f"rank {error.rank} stopped with {raised.kind}: {text[0][:300]}{_at(raised.place)}"
    if raised:
        return f"rank {error.rank} lost the rank that it exchanged a message with{_at(raised.place)}"
    if error.exitcode == -signal.SIGABRT:
        return _killed(error, notes)
    if error.exitcode is not None:
        return f"rank {error.rank} ended its own process, as os._exit does: return a value instead"
    return f"rank {error.rank} stopped: {str(error).splitlines()[0]}"


def _of_messages_that_failed(notes: Notes) -> str | None:
    calls = of_messages(notes)
    return (
        into_one_buffer(calls) or left_behind(notes) or message_that_does_not_fit(calls) or unmatched(notes)
    )


def _killed(error: WorkerError, notes: Notes) -> str:
    """Explain a process that a signal ended. Its stack, where there is one, has the reader's line."""
    name = signal.Signals(-error.exitcode).name if error.exitcode else ""
    stack = [(file, int(line), function) for file, line, function in _FRAME.findall(str(error))]
    place = own_place(reversed(stack)) or _last_place(notes, error.rank)
    why = f": {_DIED[name]}" if name in _DIED else ""
    return f"rank {error.rank}'s process was killed by signal {name}{why}{_at(place)}"


def never_ended(error: LaunchTimeout, notes: Notes, seconds: float) -> str:
    """The deadline passed: some rank computes for ever, or all that are left wait for each other."""
    after = f"after {seconds:g} s"
    if found := to_nobody(of_messages(notes)):
        return found
    if error.ranks:
        rank = error.ranks[0]
        place = own_place(error.stacks.get(rank, ()))
        return f"{after} rank {rank} was still computing, not waiting: an endless loop?{_at(place)}"
    if found := into_one_buffer(of_messages(notes)) or left_behind(notes):
        return f"deadlock: {after} {found}"
    misfit = message_that_does_not_fit(of_messages(notes))
    return f"deadlock: {after} {misfit or unmatched(notes) or 'all ranks wait for each other. ' + _BATCH}"


def cannot_travel(error: TypeError, functions: Sequence[Any]) -> str:
    """The launcher could not pickle the call; ask again about each function alone, to name what it uses."""
    for function in filter(inspect.isfunction, functions):
        try:
            pickle_payload(function, (), {})
        except TypeError as alone:
            error = alone
    what = str(error).partition(" (")[0].removeprefix("launch cannot send ")
    return f"your answer cannot be sent to the ranks, because of {what}: create it inside the function"


def of_messages(notes: Notes) -> list[list[Message]]:
    return [[note for note in own if isinstance(note, Message)] for own in notes]


def to_nobody(calls: Sequence[Sequence[Message]]) -> str | None:
    """Return the first message to or from a rank that does not exist."""
    for rank, own in enumerate(calls):
        for call in own:
            if call.peer is not None and call.peer not in range(len(calls)):
                what = "receives from" if call.received else "sends to"
                return (
                    f"rank {rank} {what} rank {call.peer}, and the ranks are 0 to {len(calls) - 1}: count "
                    f"modulo the number of ranks{_at(call.place)}"
                )
    return None


def message_that_does_not_fit(calls: Sequence[Sequence[Message]]) -> str | None:
    """The first message whose tensor differs, in size or type, from the tensor that it is received into."""
    for sender, sent in enumerate(calls):
        for receiver in {call.peer for call in sent if call.op == "send" and call.peer is not None}:
            out = [call for call in sent if call.op == "send" and call.peer == receiver]
            into = [call for call in calls[receiver] if call.received and call.peer == sender]
            for there, here in zip(out, into, strict=False):
                if (there.numel, there.dtype) != (here.numel, here.dtype):
                    return (
                        f"rank {sender} sends {_size(there)}, and rank {receiver} receives them into a "
                        f"tensor of {_size(here)}: both must have the same size and type{_at(here.place)}"
                    )
    return _collectives_that_differ(calls)


def _collectives_that_differ(calls: Sequence[Sequence[Message]]) -> str | None:
    """Return the first collective that two ranks call differently."""
    own = [[call for call in sent if call.collective] for sent in calls]
    for number, together in enumerate(zip(*own, strict=False)):
        for rank, call in enumerate(together):
            first = together[0]
            if (call.op, call.numel, call.dtype) != (first.op, first.numel, first.dtype):
                return (
                    f"collective number {number + 1} is {first.call} of {_size(first)} on rank 0 and "
                    f"{call.call} of {_size(call)} on rank {rank}: all ranks must make the same calls in the "
                    f"same order{_at(call.place)}"
                )
    return None


def unmatched(notes: Notes) -> str | None:
    """Who waits for whom: the first receive without a send, send without a receive, or missing collective."""
    calls = of_messages(notes)
    sent = Counter((rank, c.peer) for rank, own in enumerate(calls) for c in own if c.op == "send")
    awaited = Counter((c.peer, rank) for rank, own in enumerate(calls) for c in own if c.received)
    waiting = {rank: call for rank, own in enumerate(notes) if (call := _waits_in(own))}
    all_wait = len(waiting) == len(notes) > 1 and sent != awaited
    for word, other, op, others in (("send", "receive", "send", awaited), ("receive", "send", "recv_", sent)):
        if all_wait and not others and all(call.op == op for call in waiting.values()):
            return (
                f"all {len(notes)} ranks wait for each other, because all of them {word} first and {other} "
                f"second. {_BATCH}{_at(waiting[0].place)}"
            )
    if found := _ways_that_do_not_meet(calls):
        return found
    for rank, call in waiting.items():
        place = _at(call.place)
        for peer in range(len(notes)):
            if peer == rank and sent[rank, rank] + awaited[rank, rank]:
                return f"rank {rank} exchanges a message with itself: its own tensor is there already{place}"
            state = "has returned" if RETURNED in notes[peer] else "waits, too"
            if awaited[peer, rank] > sent[peer, rank]:
                never = f"never sent{f' (it sent {sent[peer, rank]})' if sent[peer, rank] else ''}"
                return (
                    f"rank {rank} waits for a message from rank {peer} that was {never}: rank {peer} "
                    f"{state}{_sent_elsewhere(peer, sent, awaited)}{place}"
                )
            if sent[rank, peer] > awaited[rank, peer] and call.op == "send":
                return (
                    f"rank {rank} waits until rank {peer} receives its message, and rank {peer} "
                    f"{state}{_awaits_others(peer, sent, awaited)}{place}"
                )
    return _missing_collective(notes, calls)


def _ways_that_do_not_meet(calls: Sequence[Sequence[Message]]) -> str | None:
    """Whether all ranks send by one distance, and receive by one that is not its opposite."""
    n = len(calls)
    by = lambda received: {
        (c.peer - rank) % n
        for rank, own in enumerate(calls)
        for c in own
        if c.peer is not None and c.received == received
    }
    to, origin = by(False), by(True)
    if any(not any(c.received for c in own) or all(c.received for c in own) for own in calls):
        return None
    if not len(to) == len(origin) == 1 or 0 in to | origin or not (min(to) + min(origin)) % n:
        return None
    name = lambda distance: f"(rank {'+' if 2 * distance <= n else '-'} {min(distance, n - distance)}) % {n}"
    first = next(call for own in calls for call in own if call.received)
    return (
        f"each rank sends to {name(min(to))} and receives from {name(min(origin))}, so nobody receives what "
        f"is sent. What goes to {name(min(to))} comes from {name(n - min(to))}{_at(first.place)}"
    )


def _sent_elsewhere(rank: int, sent: Counter, awaited: Counter) -> str:
    """To whom a rank has sent a message that was not received."""
    to = [str(peer) for _, peer in sent if sent[rank, peer] > awaited[rank, peer]]
    return f", and it sent a message to rank {to[0]} that has not been received" if to else ""


def _awaits_others(rank: int, sent: Counter, awaited: Counter) -> str:
    """From whom a rank receives who has sent it nothing."""
    others = [str(peer) for peer, to in awaited if to == rank and awaited[peer, rank] > sent[peer, rank]]
    return f", for a message from rank {others[0]} that was not sent" if others else ""


def _waits_in(own: Sequence[Message | int | str]) -> Message | None:
    """Return a rank's last call, unless the rank came to its end or made none."""
    return own[-1] if own and isinstance(own[-1], Message) else None


def _missing_collective(notes: Notes, calls: list[list[Message]]) -> str | None:
    made = [sum(call.collective for call in own) for own in calls]
    if not made or min(made) == max(made):
        return None
    few, many = made.index(min(made)), made.index(max(made))
    call = [call for call in calls[many] if call.collective][min(made)]
    state = "has returned" if RETURNED in notes[few] else "waits for something else"
    return (
        f"rank {many} waits in {call.call}, its collective number {min(made) + 1}, and rank {few} makes only "
        f"{min(made)} and {state}: every rank must make the same calls{_at(call.place)}"
    )


def _last_place(notes: Notes, rank: int):
    return next((note.place for note in reversed(notes[rank]) if isinstance(note, Message)), None)


def _size(call: Message) -> str:
    return f"{call.numel} elements of {str(call.dtype).removeprefix('torch.')}"


def _at(place) -> str:
    return f" ({place})" if place else ""
