"""What a right reduce-scatter sends that a ring does not: whole tensors, a longer type, padding."""

from zerolab.course.attempts import Attempt
from zerolab.course.lessons.collectives.cases import Case
from zerolab.course.messages import Calls
from zerolab.course.wording import count


def too_much_sent(outcome: Attempt, case: Case) -> str | None:
    """Right values, but too many bytes, or messages to others than one neighbour."""
    if through := through_one_rank(outcome.calls):
        return f"the values are right, but {through}. In a ring each rank sends chunks to one neighbour"
    for rank, sent in enumerate(outcome.messages):
        right = f"the values are right, but rank {rank} sends"
        own = case.cuts[rank].stop - case.cuts[rank].start
        allowed = (case.numel - own) * case.dtype.itemsize  # all chunks but its own
        if longer := of_longer_type(outcome, case, rank):
            return f"the values are right, but {longer}"
        if any(message.numel >= case.numel for message in sent):
            return (
                f"{right} the whole tensor each round: {outcome.bytes_sent(rank)} bytes where a ring sends "
                f"{allowed}. Send one chunk at a time"
            )
        if outcome.bytes_sent(rank) > allowed + case.dtype.itemsize * case.world_size:
            said = f"{right} {outcome.bytes_sent(rank)} bytes, in {count(len(sent), 'message')}"
            return f"{said}. A ring sends {allowed}: {_why_more([m.numel for m in sent], case)}"
    return _several_peers(outcome)


def _why_more(lengths: list[int], case: Case) -> str:
    """Why the bytes of a rank are more than a ring's: too many messages, or messages that are too long."""
    if len(lengths) > case.world_size - 1:
        return "stop after N-1 rounds"
    return (
        f"a message has {max(lengths)} elements, and the longest chunk {case.longest}. Send each chunk as it "
        "is, without padding"
    )


def of_longer_type(outcome: Attempt, case: Case, rank: int) -> str | None:
    """Whether a rank's messages are in a longer type than the tensor."""
    for message in outcome.messages[rank]:
        if message.dtype and message.dtype.itemsize > case.dtype.itemsize:
            long, short = (str(dtype).removeprefix("torch.") for dtype in (message.dtype, case.dtype))
            times = message.dtype.itemsize // case.dtype.itemsize
            return f"rank {rank} sends {long}, and the tensor is {short}: that is {times} times the bytes"
    return None


def other_type(outcome: Attempt, case: Case) -> str | None:
    """Whether a message is in another type than the tensor."""
    for rank, sent in enumerate(outcome.messages):
        for message in sent:
            if message.dtype and message.dtype != case.dtype:
                there, here = (str(dtype).removeprefix("torch.") for dtype in (message.dtype, case.dtype))
                return f"rank {rank} sends {there}, and the tensor is {here}"
    return None


def through_one_rank(calls: Calls) -> str | None:
    """Whether all messages go through one rank, as in lesson 00."""
    n = len(calls)
    partners = [{call.peer for call in own if call.peer is not None} for own in calls]
    for root in range(n):
        others = [partners[rank] for rank in range(n) if rank != root]
        if n > 2 and all(each == {root} for each in others):
            return f"all messages go through rank {root}, as in lesson 00, so its link carries everything"
    return None


def _several_peers(outcome: Attempt) -> str | None:
    world_size = len(outcome.calls)
    far = {
        (message.peer - rank) % world_size
        for rank, sent in enumerate(outcome.messages)
        for message in sent
        if message.peer is not None
    }
    if len(far) < 2:
        return None
    return (
        "the values are right, but a rank sends to several others: in a ring it talks to rank + 1 alone, or "
        "to rank - 1 alone, so that each link carries one message at a time"
    )
