"""Find the first messages, or collectives, whose two sides differ in size or type."""

from zerolab.course.messages import Calls, Message, at
from zerolab.course.wording import count


def message_that_does_not_fit(calls: Calls) -> str | None:
    """The first message whose tensor differs, in size or type, from the tensor that it is received into."""
    for sender, sent in enumerate(calls):
        for receiver in {call.peer for call in sent if call.op == "send" and call.peer is not None}:
            out = [call for call in sent if call.op == "send" and call.peer == receiver]
            into = [call for call in calls[receiver] if call.received and call.peer == sender]
            for there, here in zip(out, into, strict=False):
                if (there.numel, there.dtype) != (here.numel, here.dtype):
                    them = "it" if there.numel == 1 else "them"
                    return (
                        f"rank {sender} sends {_size(there)}, and rank {receiver} receives {them} into a "
                        f"tensor of {_size(here)}: both must have the same size and type{at(here.place)}"
                    )
    return _collectives_that_differ(calls)


def _collectives_that_differ(calls: Calls) -> str | None:
    """Return the first collective that two ranks call differently."""
    own = [[call for call in sent if call.collective] for sent in calls]
    for number, together in enumerate(zip(*own, strict=False)):
        for rank, call in enumerate(together):
            first = together[0]
            if _what(call) != _what(first):
                return (
                    f"collective number {number + 1} is {first.call} of {_size(first)} on rank 0 and "
                    f"{call.call} of {_size(call)} on rank {rank}: all ranks must make the same calls in the "
                    f"same order{at(call.place)}"
                )
    return None


def _what(call: Message) -> tuple:
    """What ranks have to agree on. These collectives give each rank a piece of any length."""
    uneven = call.op in ("reduce_scatter_", "alltoall_", "alltoall_base_")
    return call.op, None if uneven else call.numel, call.dtype


def _size(call: Message) -> str:
    return f"{count(call.numel, 'element')} of {str(call.dtype).removeprefix('torch.')}"
