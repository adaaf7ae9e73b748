"""Lesson 03's buckets: what is wrong with the messages of right averages, over all cases together.

The first case in which they are wrong says what: too many, too large, too many bytes. The rule that leads to
the messages of all cases says why.
"""

from collections.abc import Callable, Mapping, Sequence

from zerolab.course.attempts import Attempt
from zerolab.course.lessons.data_parallel.bucket_rules import BEFORE, rules
from zerolab.course.lessons.data_parallel.filled import ORDERS, Case, buckets, bytes_of, cut_up
from zerolab.course.messages import Message

Sent = Mapping[Case, Attempt]
ONCE = "send each gradient once and nothing else, and empty the list of those that wait when they are sent"


def wrong_messages(sent: Sent) -> str | None:
    """Too many messages, one that is larger than a bucket, or more bytes than the gradients have."""
    for case, outcome in sent.items():
        for rank, calls in enumerate(outcome.calls if case.ranks > 1 else []):
            messages = [call for call in calls if not call.received]
            if problem := _problem(case, rank, messages):
                what, fallback = problem
                why = _of_calls(case, messages) or _rule(sent) or _extra(case, messages)
                why = why or _in_pieces(case, messages) or fallback
                return f"with buckets of {case.bucket_bytes} bytes, {what}: {why}"
    return None


def _problem(case: Case, rank: int, messages: Sequence[Message]) -> tuple[str, str] | None:
    """What is wrong with a rank's messages, and what may be the reason."""
    plan = bytes_of(case, buckets(case))
    times = _of_a_ring(case, messages)
    if len(messages) > len(plan) * times:
        enough = f"{len(plan)} {'is' if len(plan) == 1 else 'are'} enough"
        return (
            f"rank {rank} sends {len(messages) // times} messages, and {enough}",
            "a bucket takes gradients until the next one does not fit, and it may be full to the last byte",
        )
    if other := {message.dtype for message in messages} - {case.dtype}:
        kinds = str(other.pop()).removeprefix("torch."), str(case.dtype).removeprefix("torch.")
        return (
            f"rank {rank} sends {kinds[0]}, and its gradients are {kinds[1]}",
            "all-reduce the gradients in their own type, which needs no more bytes than they have",
        )
    sent = [] if times > 1 else [message.nbytes for message in messages]
    if sum(sent) > sum(case.nbytes):
        return (
            f"rank {rank} sends {sum(sent)} bytes, and the gradients have {sum(case.nbytes)}",
            _longer_than_its_gradients(sent, plan) or ONCE,
        )
    if large := [nbytes for nbytes in sent if nbytes > case.bucket_bytes and nbytes not in case.nbytes]:
        return (
            f"a message of rank {rank} has {large[0]} bytes",
            f"{BEFORE[0].lower()}{BEFORE[1:]}, and count bytes, gradient.nbytes. Only a gradient larger than "
            "a bucket may be sent in a larger message",
        )
    return None


def _longer_than_its_gradients(sent: Sequence[int], plan: Sequence[int]) -> str | None:
    """Which message is longer than the gradients of its bucket, if no message is shorter than its own."""
    if len(sent) != len(plan) or any(own < right for own, right in zip(sent, plan, strict=True)):
        return None
    number = next(index for index, own in enumerate(sent) if own > plan[index])
    return (
        f"message {number} has {sent[number]} bytes, and the gradients of its bucket have {plan[number]}. "
        "Send the part of the tensor that holds gradients, and nothing behind it"
    )


def _of_a_ring(case: Case, messages: Sequence[Message]) -> int:
    """In how many messages the ring makes one all-reduce; 1 for torch's own collectives."""
    return 2 * (case.ranks - 1) if {message.call for message in messages} == {"ring.all_reduce"} else 1


def _of_calls(case: Case, messages: Sequence[Message]) -> str | None:
    """Whether other functions were called than one all-reduce for each bucket."""
    calls = sorted({message.call for message in messages})
    if any("gather" in message.op for message in messages):
        return (
            f"{' and '.join(calls)} brings every rank the gradients of all. Call one dist.all_reduce for "
            "each bucket"
        )
    if "barrier" in {message.op for message in messages}:
        return "dist.barrier sends messages, too, and nothing needs it"
    if len(calls) > 1:
        return f"it calls {' and '.join(calls)}. One dist.all_reduce for each bucket does both"
    if 0 in [message.nbytes for message in messages]:
        return "one of them is empty: send only where something waits, also before the first gradient"
    return None


def _rule(sent: Sent) -> str | None:
    """The rule that leads to the messages of all ranks in all cases."""
    fits = [why for why, rule in rules() if all(_is(rule, case, each) for case, each in sent.items())]
    return ", or else ".join(fits[:2]) or None


def _in_pieces(case: Case, messages: Sequence[Message]) -> str | None:
    """Whether the messages of this one case are those of large gradients that are cut."""
    if [message.nbytes for message in messages] != cut_up(case):
        return None
    return "a gradient that is larger than a bucket is sent by itself, in one message and not in pieces"


def _is(rule: Callable[[Case], Sequence[int]], case: Case, outcome: Attempt) -> bool:
    return all([m.nbytes for m in own] == [*rule(case)] for own in outcome.messages)


def _extra(case: Case, messages: Sequence[Message]) -> str | None:
    """Messages beside those of the right buckets, if these are there in their order."""
    plan, extra = bytes_of(case, buckets(case)), []
    for number, message in enumerate(messages):
        if plan and message.nbytes == plan[0] and message.dtype == case.dtype:
            plan.pop(0)
        else:
            extra.append((number, message))
    if plan or not extra:
        return None
    number, message = extra[0]
    one = message.numel == 1
    elements = "1 element" if one else f"{message.numel} elements"
    if message.numel in case.sizes:
        return f"message {number}, of {elements}, is there beside the buckets: send each gradient once"
    belong = "belongs" if one else "belong"
    return f"message {number} has {elements} that {belong} to no gradient: send gradients and nothing else"


def wrong_order(sent: Sent) -> str | None:
    """Whether the messages have the sizes of buckets that were filled in another order than the list's."""
    for case, outcome in sent.items():
        plan, own = bytes_of(case, buckets(case)), [message.nbytes for message in outcome.messages[0]]
        if _of_a_ring(case, outcome.messages[0]) > 1 or own == plan or case.ranks == 1:
            continue
        found = [name for name, rule in ORDERS.items() if all(_is(rule, c, o) for c, o in sent.items())]
        which = (
            f"rank 0 sends the gradients {found[0]}"
            if found
            else f"rank 0 sends messages of {_listed(own)} bytes, and in the order of the list they have "
            f"{_listed(plan)}"
        )
        return (
            f"with buckets of {case.bucket_bytes} bytes, {which}: backward computes the gradients in the "
            "order of the list, so begin with the first and keep that order"
        )
    return None


def _listed(numbers: Sequence[int], most: int = 6) -> str:
    return ", ".join(map(str, numbers[:most])) + ", …" * (len(numbers) > most)


def in_flight(messages: Sequence[Message]) -> int:
    """How many messages that were started were not waited for at once, at most."""
    started = [message for message in messages if message.started]
    return max((number + 1 - message.waited for number, message in enumerate(started)), default=0)
