"""Lesson 03's buckets: rules that fill them in another way, and the bytes of the messages they lead to."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from zerolab.course.lessons.data_parallel.filled import (
    Case,
    Fits,
    buckets,
    bytes_of,
    chunks,
    cut_up,
    pieces,
    shares,
)

Rule = Callable[[Case], Sequence[int]]


def _filled(fits: Fits | None = None, **how: Any) -> Rule:
    options = {**how, "fits": fits} if fits else how
    return lambda case: bytes_of(case, buckets(case, **options))


def _limit(factor: Callable[[Case], float]) -> Rule:
    return lambda case: bytes_of(case, buckets(case, limit=int(case.bucket_bytes * factor(case))))


def _counting(weight: int) -> Rule:
    """Each element counts so much, whatever its type."""
    return lambda case: bytes_of(case, buckets(case, weights=[weight * size for size in case.sizes]))


def _right(case: Case) -> list[int]:
    return bytes_of(case, buckets(case))


BEFORE = "Send what waits before a gradient that does not fit is added"
# fmt: off
RULES: Mapping[str, Rule] = {
    "each gradient is sent by itself. Collect them in a list, and send it when the next one does not fit":
        lambda c: c.nbytes,
    "the first bucket is right, and each gradient after it is sent by itself, as if it did not fit. A count "
    "of bytes that is not set back to 0 when a bucket is sent leads to this":
        _filled(reset=False),
    "a gradient that fills a bucket to the last byte is sent with the next bucket. Send only when the count "
    "is larger than bucket_bytes":
        _filled(lambda counted, own, limit: counted + own < limit),
    "the gradient that a bucket begins with is not counted. Begin the count with its bytes, and not with 0":
        _filled(first_counts=False),
    f"all gradients are in one message, whatever bucket_bytes is. {BEFORE}":
        lambda c: [sum(c.nbytes)],
    f"a bucket is sent when it holds more than bucket_bytes already. {BEFORE}":
        _filled(lambda counted, own, limit: counted <= limit),
    f"a bucket is sent when it holds bucket_bytes or more already. {BEFORE}":
        _filled(lambda counted, own, limit: counted < limit),
    f"a bucket is sent only where it holds exactly bucket_bytes. {BEFORE}":
        _filled(lambda counted, own, limit: counted != limit),
    "only the size of the next gradient is compared with bucket_bytes: add the bytes that wait":
        _filled(lambda counted, own, limit: own <= limit),
    "a gradient that is larger than a bucket is sent together with those that wait. Send what waits before "
    "it, and then the large one by itself":
        _filled(lambda counted, own, limit: counted <= limit and (own > limit or counted + own <= limit)),
    "elements are counted, and bucket_bytes is a number of bytes: count gradient.nbytes":
        _counting(1),
    "each element counts 4 bytes, whatever its type: count gradient.nbytes":
        _counting(4),
    "each element counts 8 bytes, whatever its type: count gradient.nbytes":
        _counting(8),
    "each element counts 2 bytes, whatever its type: count gradient.nbytes":
        _counting(2),
    "the messages are those of a limit of bucket_bytes times 1000 or 1024: bucket_bytes is a number of bytes":
        _limit(lambda c: 1024),
    "the messages are those of a limit of bucket_bytes times the number of ranks: the limit is bucket_bytes":
        _limit(lambda c: c.ranks),
    "the messages are those of a limit of bucket_bytes divided by the number of ranks: the limit is "
    "bucket_bytes":
        _limit(lambda c: 1 / c.ranks),
    "the messages are those of a limit of about half of bucket_bytes: a bucket may be full to the last byte":
        _limit(lambda c: 1 / 2),
    "the messages are those of a limit of about twice bucket_bytes: the limit is bucket_bytes":
        _limit(lambda c: 2),
    "a gradient that is larger than a bucket is sent by itself, in one message and not in pieces":
        cut_up,
    "all gradients stand in one tensor that is cut every bucket_bytes: a gradient stays whole, and one that "
    "is larger than a bucket is sent by itself":
        lambda c: pieces(c, c.bucket_bytes),
    "all gradients stand in one tensor that is cut into equal chunks: a gradient stays whole, and one that "
    "is larger than a bucket is sent by itself":
        chunks,
    "the list is cut into parts of equal length: gradients differ in size, so count their bytes":
        shares,
    "the list of those that wait is not emptied when they are sent: send each gradient once and nothing "
    "else, and empty the list":
        lambda c: list(accumulate(_right(c))),
    "each message is filled up to bucket_bytes with elements of no gradient: send each gradient once and "
    "nothing else":
        lambda c: [max(nbytes, c.bucket_bytes) for nbytes in _right(c)],
    "each bucket is sent twice: send each gradient once and nothing else":
        lambda c: _right(c) * 2,
    "each bucket is sent twice, one after the other: send each gradient once and nothing else":
        lambda c: [nbytes for nbytes in _right(c) for _ in range(2)],
    "a gradient that is larger than a bucket is sent by itself, and again with the buckets: send each "
    "gradient once and nothing else":
        lambda c: [nbytes for nbytes in c.nbytes if nbytes > c.bucket_bytes] + _right(c),
}
# fmt: on


def _by_number(many: int) -> Rule:
    return lambda case: bytes_of(case, buckets(case, weights=[1] * len(case.sizes), limit=many))


def _longer(more: int) -> Rule:
    return lambda case: [nbytes + more * case.dtype.itemsize for nbytes in _right(case)]


def rules() -> Iterator[tuple[str, Rule]]:
    """All rules, and those that put a fixed number of gradients into a bucket, or elements behind each."""
    yield from RULES.items()
    for many in range(2, 9):
        yield f"each bucket has {many} gradients, whatever their size: count their bytes", _by_number(many)
    for more in range(1, 5):
        which = "1 element that belongs" if more == 1 else f"{more} elements that belong"
        yield f"each message has {which} to no gradient: send gradients and nothing else", _longer(more)
