"""Lesson 03's buckets: which gradients fill each of them, and what is wrong with a rank's messages."""

from collections.abc import Sequence

import torch

from zerolab.course.attempts import Attempt
from zerolab.course.wire import Message

SHAPES = ((10,), (5, 12), (30,), (7, 10), (30,), (100, 2), (3,), (20,), (4, 10))
SIZES = [torch.Size(shape).numel() for shape in SHAPES]


# Orders in which a list may be gone through, other than its own.
ORDERS = {
    "from the last to the first": list(reversed(range(len(SIZES)))),
    "from the smallest to the largest": sorted(range(len(SIZES)), key=lambda index: SIZES[index]),
    "from the largest to the smallest": sorted(range(len(SIZES)), key=lambda index: -SIZES[index]),
}


def buckets(
    bucket_bytes: int,
    reset: bool = True,
    to_the_last_byte: bool = True,
    order: Sequence[int] = range(len(SIZES)),
    first_counts: bool = True,
) -> list[list[int]]:
    """Return the numbers of the gradients in each bucket, where each takes what still fits into it.

    Not `reset`: the count of bytes goes on after a bucket. Not `to_the_last_byte`: no bucket is quite full.
    Not `first_counts`: the gradient that a later bucket begins with is not counted.
    """
    found: list[list[int]] = [[]]
    counted = 0
    for index in order:
        size = SIZES[index]
        over = counted + 8 * size - bucket_bytes
        if found[-1] and (over > 0 or (over == 0 and not to_the_last_byte)):
            found.append([])
            counted *= not reset
        found[-1].append(index)
        counted += 8 * size * (first_counts or len(found) == 1 or len(found[-1]) > 1)
    return found


def wrong_messages(outcome: Attempt, bucket_bytes: int) -> str | None:
    """Too many messages, one that is larger than a bucket, or more bytes than the gradients have."""
    size, enough = len(outcome.calls), len(buckets(bucket_bytes))
    where = f"with buckets of {bucket_bytes} bytes"
    for rank, sent in enumerate(outcome.messages if size > 1 else []):
        rings = {message.call for message in sent} == {"ring.all_reduce"}
        times = 2 * (size - 1) if rings else 1  # one collective of the ring, in so many messages
        if len(sent) > enough * times:
            return (
                f"{where}, rank {rank} sends {len(sent) // times} messages, and {enough} "
                f"{'is' if enough == 1 else 'are'} enough: {_why_so_many(sent, bucket_bytes)}"
            )
        if problem := None if rings else _wrong_bytes([message.nbytes for message in sent], bucket_bytes):
            return f"{where}, {problem.format(rank=rank)}"
    return None


def wrong_order(outcome: Attempt, bucket_bytes: int) -> str | None:
    """Whether the messages have the sizes of buckets that were filled in another order than the list's."""
    for rank, sent in enumerate(outcome.messages):
        nbytes = [message.nbytes for message in sent]
        if nbytes == _bytes_of(buckets(bucket_bytes)):
            continue
        for name, order in ORDERS.items():
            if nbytes == _bytes_of(buckets(bucket_bytes, order=order)):
                return (
                    f"with buckets of {bucket_bytes} bytes, rank {rank} sends the gradients {name}: backward "
                    "computes them in the order of the list, so begin with the first and keep that order"
                )
    return None


def _bytes_of(plan: Sequence[Sequence[int]]) -> list[int]:
    return [8 * sum(SIZES[index] for index in bucket) for bucket in plan]


def _why_so_many(sent: Sequence[Message], bucket_bytes: int) -> str:
    """Return which rule leads to messages of these sizes."""
    rules = {
        "each gradient is sent by itself. Collect them in a list, and send it when the next one does not fit":
            [[index] for index in range(len(SIZES))],
        "the first bucket is right, and each gradient after it is sent by itself, as if it did not fit. A "
        "count of bytes that is not set back to 0 when a bucket is sent leads to this":
            buckets(bucket_bytes, reset=False),
        "a gradient that fills a bucket to the last byte is sent with the next bucket. Send only when the "
        "count is larger than bucket_bytes":
            buckets(bucket_bytes, to_the_last_byte=False),
    }  # fmt: skip
    nbytes = [message.nbytes for message in sent]
    if 0 in nbytes:
        return "one of them is empty: send only where something waits, also before the first gradient"
    if nbytes == _cut_up(bucket_bytes):
        return "a gradient that is larger than a bucket is sent by itself, in one message and not in pieces"
    known = ", or else ".join(why for why, plan in rules.items() if _bytes_of(plan) == nbytes)
    unknown = "a bucket takes gradients until the next one does not fit, and it may be full to the last byte"
    return known or unknown


def _cut_up(bucket_bytes: int) -> list[int]:
    """The bytes of messages, if a gradient that is larger than a bucket is cut into pieces."""
    found: list[int] = []
    for nbytes in _bytes_of(buckets(bucket_bytes)):
        full, rest = divmod(nbytes, bucket_bytes) if nbytes > bucket_bytes else (0, nbytes)
        found += [*[bucket_bytes] * full, *([rest] if rest else [])]
    return found


def _wrong_bytes(sent: list[int], bucket_bytes: int) -> str | None:
    """Return what is wrong with the bytes of the messages of one rank, which are few enough."""
    enough, alone = 8 * sum(SIZES), {8 * size for size in SIZES}
    if sum(sent) > enough:
        return (
            f"rank {{rank}} sends {sum(sent)} bytes, and the gradients have {enough}: send each gradient "
            "once and nothing else, and empty the list of those that wait when they are sent"
        )
    if sent == _bytes_of(buckets(bucket_bytes, first_counts=False)) != _bytes_of(buckets(bucket_bytes)):
        return (
            f"the messages of rank {{rank}} have up to {max(sent)} bytes: the gradient that a bucket begins "
            "with is not counted. Begin the count with its bytes, and not with 0"
        )
    if large := [nbytes for nbytes in sent if nbytes > bucket_bytes and nbytes not in alone]:
        return (
            f"a message of rank {{rank}} has {large[0]} bytes: send what waits before a gradient that does "
            "not fit is added, and count bytes, gradient.nbytes. Only a gradient larger than a bucket may be "
            "sent in a larger message"
        )
    return None
