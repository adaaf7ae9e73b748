"""Find tensors that were used before their message was received, or changed before it was sent.

isend, irecv and batch_isend_irecv return handles, and so does a collective with async_op=True. Right values
prove nothing here: without the wait they depend on timing.
"""

from collections.abc import Sequence

from zerolab.course.messages import Calls, Message, Notes, at, of_messages

_WAIT = (
    "until wait() has returned, a tensor may not be filled yet, or not be sent yet. Call .wait() on every "
    "handle, of sends too, before you use the tensors"
)


def into_one_buffer(calls: Calls) -> str | None:
    """Two receives that are on their way at once, into one tensor."""
    for rank, own in enumerate(calls):
        seen = set()
        for call in (call for call in own if call.received and call.started and call.numel):
            if (call.buffer, call.waited) in seen:
                return (
                    f"rank {rank} starts a second receive into a tensor before it has waited for the first, "
                    "so that one message overwrites the other: receive into a tensor for "
                    f"each{at(call.place)}"
                )
            seen.add((call.buffer, call.waited))
    return None


def into_what_is_sent(calls: Calls) -> str | None:
    """A send and a receive that are on their way at once, of one tensor."""
    for rank, own in enumerate(calls):
        started = [call for call in own if call.started and call.numel and not call.collective]
        sent = {(call.buffer, call.waited) for call in started if not call.received}
        for call in started:
            if call.received and (call.buffer, call.waited) in sent:
                return (
                    f"rank {rank} receives into the tensor that it is sending, so what arrives overwrites "
                    f"it: receive into another tensor{at(call.place)}"
                )
    return None


def not_waited(calls: Calls, waits: Sequence[int]) -> str | None:
    """Find a rank that started more messages than it waited for, and returned."""
    for rank, (own, waited) in enumerate(zip(calls, waits, strict=False)):
        started = [call for call in own if call.started]
        if waited < len(started):
            return _too_few_waits(rank, started, waited)
    return None


def used_early(calls: Calls) -> str | None:
    """Find a tensor that was read while its message arrived, or changed while it was sent."""
    for rank, own in enumerate(calls):
        for call in own:
            if call.early and call.op == "send":
                return (
                    f"rank {rank} changes a tensor while it is being sent{at(call.early)}: {call.call} "
                    "returns at once, and the message is sent later. Call .wait() on the handle before"
                )
            if call.early:
                ends = f"{call.call} has ended" if call.collective else "its message has arrived"
                return (
                    f"rank {rank} uses a tensor before {ends}{at(call.early)}: {call.call} returns at once, "
                    "and wait() returns when the tensor is filled. Call .wait() on the handle before"
                )
    return None


def left_behind(notes: Notes) -> str | None:
    """Find a rank that waited for some of its messages only, and continued or returned."""
    for rank, own in enumerate(notes):
        started: list[Message] = []
        for note in own:
            at_end = isinstance(note, int)
            waited = note if isinstance(note, int) else note.waited if isinstance(note, Message) else 0
            before = started if at_end else [call for call in started if call.waited < waited]
            if waited < len(before) and (waited or at_end):
                return _too_few_waits(rank, before, waited)
            if isinstance(note, Message) and note.started:
                started.append(note)
    return None


def given_up(notes: Notes) -> str | None:
    """Find a rank that waits for a message whose sender went on without its handle.

    gloo gives up a send when its handle is gone and the other rank was not there yet.
    """
    calls = of_messages(notes)
    for rank, own in enumerate(notes):
        call = own[-1] if own else None
        if not isinstance(call, Message) or not call.received or call.started or call.peer is None:
            continue
        if any(each.op == "recv_any_source_" for each in calls[rank]):  # whose message that took is not known
            continue
        theirs = calls[call.peer]
        of_this_tag = lambda each, peer, tag=call.tag: each.peer == peer and each.tag == tag
        awaited = sum(each.received and of_this_tag(each, call.peer) for each in calls[rank])
        sends = [each for each in theirs if each.op == "send" and of_this_tag(each, rank)]
        if len(sends) < awaited or not (sent := sends[awaited - 1]).started:
            continue
        waits = [note for note in notes[call.peer] if isinstance(note, int)]  # of a rank that has returned
        if not theirs[-1].started and (waits or [theirs[-1].waited])[-1] == sent.waited:
            return (
                f"rank {rank} waits for the message that rank {call.peer} started and did not wait for: "
                f"{_WAIT}{at(sent.place)}"
            )
    return None


def _too_few_waits(rank: int, started: Sequence[Message], waited: int) -> str:
    these, waited_for = f"{len(started)} messages", f"waited for {waited or 'none'} of them"
    if len(started) == 1:
        these, waited_for = "a message", "did not wait for it"
    return f"rank {rank} started {these} and {waited_for}: {_WAIT}{at(started[-1].place)}"
