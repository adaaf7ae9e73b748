"""Explain a deadlock, or a rank that lost its peer: who waits for whom, and why the message does not come.

The evidence is what each rank had called by then. A rank that has not returned waits in its last call.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from zerolab.course.messages import RETURNED, Message, Notes, at, of_messages
from zerolab.course.peers import ways_that_do_not_meet
from zerolab.course.wording import count

BATCH = "dist.batch_isend_irecv, and wait for them"


class Wait(NamedTuple):
    """A rank that waits for another one to send, or to receive."""

    rank: int
    peer: int
    kind: str
    call: Message

    def __str__(self) -> str:
        if self.kind == "send":
            return f"rank {self.rank} waits for a message from rank {self.peer}"
        return f"rank {self.rank} waits until rank {self.peer} receives its message"


class Seen(NamedTuple):
    """The notes of all ranks, and how many messages were sent and received, by sender and receiver."""

    notes: Notes
    calls: list[list[Message]]
    sent: Mapping[tuple[int | None, int | None], int]
    awaited: Mapping[tuple[int | None, int | None], int]
    waiting: Mapping[int, Message]


def unmatched(notes: Notes) -> str | None:
    """Who waits for whom: ranks in a circle, a message that was never sent or received, a call not made."""
    calls = of_messages(notes)
    seen = Seen(
        notes,
        calls,
        Counter((rank, c.peer) for rank, own in enumerate(calls) for c in own if c.op == "send"),
        Counter((c.peer, rank) for rank, own in enumerate(calls) for c in own if c.received),
        {rank: own[-1] for rank, own in enumerate(notes) if own and isinstance(own[-1], Message)},
    )
    return (
        ways_that_do_not_meet(calls)
        or _with_itself(seen)
        or _other_tags(seen)
        or _circle(seen)
        or _message_alone(seen)
        or _missing_call(seen)
    )


def _with_itself(seen: Seen) -> str | None:
    for rank, call in seen.waiting.items():
        if seen.sent[rank, rank] + seen.awaited[rank, rank]:
            alone = (
                ". A ring of N ranks needs N-1 rounds, and of one rank none" if len(seen.notes) == 1 else ""
            )
            return (
                f"rank {rank} exchanges a message with itself: its own tensor is there already{alone}"
                f"{at(call.place)}"
            )
    return None


def _other_tags(seen: Seen) -> str | None:
    """A receive that waits for a message with another tag than the message that was sent."""
    for rank, call in seen.waiting.items():
        if not call.received or call.peer is None:
            continue
        sent = [each.tag for each in seen.calls[call.peer] if each.op == "send" and each.peer == rank]
        awaited = [each.tag for each in seen.calls[rank] if each.received and each.peer == call.peer]
        if len(sent) == len(awaited) and call.tag not in sent:
            return (
                f"rank {rank} receives with tag {call.tag} from rank {call.peer}, which sent with tag "
                f"{sent[-1]}: a receive takes a message of its own tag only. Use one tag in both, or "
                f"leave it out{at(call.place)}"
            )
    return None


def _circle(seen: Seen) -> str | None:
    """Ranks that wait for each other, one after the other."""
    waits = {rank: _waits_of(seen, rank) for rank in seen.waiting}
    circles = (_back_to(rank, [], waits) for rank in waits)
    circle = min(filter(None, circles), key=len, default=None)
    if not circle:
        return None
    kinds = {wait.kind for wait in circle}
    first, other = ("receive", "send") if kinds == {"send"} else ("send", "receive")
    advice = f"One of them has to {other} first. Or start both messages with {BATCH}"
    if len(kinds) > 1:
        advice = "Let the ranks make their calls in an order in which each send meets its receive"
    whole = ""
    if len(kinds) == 1 and _all_alike(seen, waits):
        whole = f"all {len(waits)} ranks wait for each other, because all of them {first} first: "
    return f"{whole}{_joined(list(map(str, circle)))}. {advice}{at(circle[0].call.place)}"


def _waits_of(seen: Seen, rank: int) -> list[Wait]:
    """What a rank's last call waits for; after handles were started, this may be any of their messages."""
    call = seen.waiting[rank]
    if call.collective or call.op == "barrier":
        return []
    found = []
    for peer in range(len(seen.notes)):
        if (call.received or call.started) and seen.awaited[peer, rank] > seen.sent[peer, rank]:
            found.append(Wait(rank, peer, "send", call))
        if (not call.received or call.started) and seen.sent[rank, peer] > seen.awaited[rank, peer]:
            found.append(Wait(rank, peer, "receive", call))
    return [wait for wait in found if call.started or wait.peer == call.peer]


def _back_to(start: int, way: list[Wait], waits: Mapping[int, Sequence[Wait]]) -> list[Wait] | None:
    """The shortest way from a rank to those it waits for, and so on, that comes back to it."""
    here = way[-1].peer if way else start
    if way and here == start:
        return way
    if here in {wait.rank for wait in way}:
        return None
    found = (_back_to(start, [*way, wait], waits) for wait in waits.get(here, ()))
    return min(filter(None, found), key=len, default=None)


def _all_alike(seen: Seen, waits: Mapping[int, Sequence[Wait]]) -> bool:
    """Whether each rank waits in its first call, and in the same one."""
    met = any(min(number, seen.awaited[pair]) for pair, number in seen.sent.items())
    kinds = {wait.kind for own in waits.values() for wait in own}
    return all(waits.values()) and len(waits) == len(seen.notes) and len(kinds) == 1 and not met


def _message_alone(seen: Seen) -> str | None:
    """The first receive without a send, or send without a receive."""
    for rank, call in seen.waiting.items():
        for peer in range(len(seen.notes)):
            state = _state(seen, peer)
            if (sent := seen.sent[peer, rank]) < seen.awaited[peer, rank]:
                never = f"never sent{f' (it sent {sent})' if sent else ''}"
                return (
                    f"rank {rank} waits for a message from rank {peer} that was {never}: rank {peer} "
                    f"{state}{_sent_elsewhere(seen, peer)}{at(call.place)}{_of_a_pair(seen, peer)}"
                )
            if seen.sent[rank, peer] > seen.awaited[rank, peer] and call.op == "send":
                return (
                    f"rank {rank} waits until rank {peer} receives its message, and rank {peer} "
                    f"{state}{_awaits_others(seen, peer)}{at(call.place)}{_of_a_pair(seen, peer)}"
                )
        arrived = sum(number for (_, to), number in seen.sent.items() if to == rank)
        if call.op == "recv_any_source_" and arrived < seen.awaited[None, rank]:
            return (
                f"rank {rank} waits for message number {seen.awaited[None, rank]} from any rank, and only "
                f"{arrived} {'was' if arrived == 1 else 'were'} sent to it{at(call.place)}"
            )
    return None


def _state(seen: Seen, rank: int) -> str:
    """Whether a rank waits, or has returned; and what it did, if it only sent or only received."""
    if RETURNED not in seen.notes[rank]:
        call = seen.waiting.get(rank)
        together = call is not None and (call.collective or call.op == "barrier")
        return f"waits, too, in {call.call}" if call and together else "waits, too"
    sends = sum(call.op == "send" for call in seen.calls[rank])
    receives = sum(call.received for call in seen.calls[rank])
    if bool(sends) == bool(receives):
        return "has returned" if sends else "has returned without a call"
    if sends:
        return f"has returned, after {count(sends, 'send')} and no receive"
    return f"has returned, after {count(receives, 'receive')} and no send"


def _sent_elsewhere(seen: Seen, rank: int) -> str:
    """To whom a rank has sent a message that was not received."""
    to = [str(peer) for _, peer in seen.sent if seen.sent[rank, peer] > seen.awaited[rank, peer]]
    return f", and it sent a message to rank {to[0]} that has not been received" if to else ""


def _awaits_others(seen: Seen, rank: int) -> str:
    """From whom a rank receives who has sent it nothing."""
    others = [
        str(peer)
        for peer, to in seen.awaited
        if to == rank and peer is not None and seen.awaited[peer, rank] > seen.sent[peer, rank]
    ]
    return f", for a message from rank {others[0]} that was not sent" if others else ""


def _of_a_pair(seen: Seen, rank: int) -> str:
    """Whether a rank has returned after an exchange with one other, and neither has addressed a third."""
    other = next((call.peer for call in seen.calls[rank]), None)
    if RETURNED not in seen.notes[rank] or other is None or len(seen.notes) < 3:
        return ""
    for one, peer in ((rank, other), (other, rank)):
        if {(call.peer, call.received) for call in seen.calls[one]} != {(peer, True), (peer, False)}:
            return ""
    first, second = sorted((rank, other))
    return (
        f". Ranks {first} and {second} send to each other and receive from each other, and address no other "
        f"rank. That is an exchange of two ranks, and here are {len(seen.notes)}: find peers for any number "
        "of ranks"
    )


def _missing_call(seen: Seen) -> str | None:
    """A collective, or a barrier, that one rank waits in and another does not call."""
    for name in ("collective", "barrier"):
        among = partial(_is_a, name)
        made = [sum(map(among, own)) for own in seen.calls]
        if not made or min(made) == max(made):
            continue
        few, many = made.index(min(made)), made.index(max(made))
        call = [call for call in seen.calls[many] if among(call)][min(made)]
        state = "has returned" if RETURNED in seen.notes[few] else "waits for something else"
        return (
            f"rank {many} waits in {call.call}, its {name} number {min(made) + 1}, and rank {few} makes only "
            f"{min(made)} and {state}: every rank must make the same calls{at(call.place)}"
        )
    return None


def _is_a(name: str, call: Message) -> bool:
    return call.collective if name == "collective" else call.op == name


def _joined(clauses: Sequence[str]) -> str:
    return ", and ".join(filter(None, [", ".join(clauses[:-1]), clauses[-1]]))
