"""Lesson 03's buckets: which gradients fill each of them, and the messages that wrong rules lead to."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

SHAPES: tuple[tuple[int, ...], ...] = (
    (10,), (5, 12), (30,), (7, 10), (30,), (100, 2), (3,), (20,), (4, 10)
)  # fmt: skip
LARGE = ((600,), (300,), (700,), (100,))
EQUAL = ((25,),) * 20


class Case(NamedTuple):
    """The number of ranks, the bytes of a bucket, and the gradients."""

    ranks: int
    bucket_bytes: int
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    dtype: torch.dtype = torch.float64

    @property
    def sizes(self) -> list[int]:
        """The elements of each gradient."""
        return [torch.Size(shape).numel() for shape in self.shapes]

    @property
    def nbytes(self) -> list[int]:
        return [self.dtype.itemsize * size for size in self.sizes]

    def __str__(self) -> str:
        kind = "" if self.dtype == torch.float64 else f", for gradients in {self.dtype}".replace("torch.", "")
        return f"{self.ranks} rank{'s' * (self.ranks > 1)} and buckets of {self.bucket_bytes} bytes{kind}"


# 800 is full to the last byte twice, and one gradient is larger. In float32 400 bytes are as many elements.
# All of LARGE is more than 8 KiB, and equal buckets show how many of them are in memory.
CASES = (
    Case(3, 800),
    Case(2, 1200),
    Case(4, 500),
    Case(2, 100_000),
    Case(2, 8, LARGE),
    Case(2, 400, dtype=torch.float32),
    Case(2, 800, EQUAL),
    Case(1, 800),
)
Fits = Callable[[int, int, int], bool]
"""From the count, what the next gradient counts, and the limit: whether it goes into the same bucket."""


def buckets(
    case: Case,
    fits: Fits = lambda counted, own, limit: counted + own <= limit,
    weights: Sequence[int] | None = None,
    limit: int | None = None,
    order: Iterable[int] | None = None,
    reset: bool = True,
    first_counts: bool = True,
) -> list[list[int]]:
    """Return the numbers of the gradients in each bucket, where each takes what still fits into it.

    `weights`: what each gradient counts, its bytes by default. Not `reset`: the count goes on after a bucket.
    Not `first_counts`: the gradient that a later bucket begins with is not counted.
    """
    found: list[list[int]] = [[]]
    weights, counted = weights or case.nbytes, 0
    limit = case.bucket_bytes if limit is None else limit
    for index in range(len(weights)) if order is None else order:
        if found[-1] and not fits(counted, weights[index], limit):
            found.append([])
            counted *= not reset
        found[-1].append(index)
        counted += weights[index] * (first_counts or len(found) == 1 or len(found[-1]) > 1)
    return found


def bytes_of(case: Case, plan: Sequence[Sequence[int]]) -> list[int]:
    return [sum(case.nbytes[index] for index in bucket) for bucket in plan]


def _by_size(case: Case, sign: int) -> list[int]:
    return sorted(range(len(case.sizes)), key=lambda index: sign * case.sizes[index])


def _large(case: Case, first: bool) -> list[int]:
    """The gradients that are larger than a bucket before all others, or behind them."""
    return sorted(range(len(case.sizes)), key=lambda index: (case.nbytes[index] > case.bucket_bytes) != first)


def _first_fit(case: Case) -> list[int]:
    """Each gradient goes into the first bucket that has room for it."""
    found: list[int] = []
    for nbytes in case.nbytes:
        place = next((at for at, held in enumerate(found) if held + nbytes <= case.bucket_bytes), None)
        if place is None:
            found.append(nbytes)
        else:
            found[place] += nbytes
    return found


# Orders in which a list may be gone through, other than its own, and the messages that they lead to.
ORDERS: Mapping[str, Callable[[Case], list[int]]] = {
    "from the last to the first": lambda c: _in(c, reversed(range(len(c.sizes)))),
    "from the smallest to the largest": lambda c: _in(c, _by_size(c, 1)),
    "from the largest to the smallest": lambda c: _in(c, _by_size(c, -1)),
    "with those that are larger than a bucket behind all others": lambda c: _in(c, _large(c, False)),
    "with those that are larger than a bucket before all others": lambda c: _in(c, _large(c, True)),
    "into the first bucket that has room, also if it is not the last": _first_fit,
}


def _in(case: Case, order: Iterable[int]) -> list[int]:
    return bytes_of(case, buckets(case, order=order))


def cut_up(case: Case) -> list[int]:
    """The bytes of messages, if a gradient that is larger than a bucket is cut into pieces."""
    found: list[int] = []
    for nbytes in bytes_of(case, buckets(case)):
        full, rest = divmod(nbytes, case.bucket_bytes) if nbytes > case.bucket_bytes else (0, nbytes)
        found += [*[case.bucket_bytes] * full, *([rest] if rest else [])]
    return found


def pieces(case: Case, nbytes: int) -> list[int]:
    """The bytes of messages, if all gradients stand in one tensor that is cut every so many bytes."""
    step = max(nbytes // case.dtype.itemsize, 1) * case.dtype.itemsize
    full, rest = divmod(sum(case.nbytes), step)
    return [step] * full + [rest] * bool(rest)


def chunks(case: Case) -> list[int]:
    """The bytes of messages, if that tensor is cut into as many equal chunks as buckets are needed."""
    many = -(-sum(case.nbytes) // case.bucket_bytes)
    return pieces(case, -(-sum(case.sizes) // many) * case.dtype.itemsize)


def shares(case: Case) -> list[int]:
    """The bytes of messages, if the list is cut into as many equal parts as buckets are needed."""
    many = -(-sum(case.nbytes) // case.bucket_bytes)
    each = -(-len(case.sizes) // many)
    return [sum(case.nbytes[at : at + each]) for at in range(0, len(case.sizes), each)]
