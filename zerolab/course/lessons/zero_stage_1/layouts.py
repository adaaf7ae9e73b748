"""Lesson 04's exercise on slices: buffers that are laid out in another way, and cut at other places.

One mistake is a place where a parameter begins, or a cut. So each layout is tried with each cut.
"""

from collections.abc import Callable, Mapping
from itertools import accumulate, product
from typing import Any

from zerolab.course.lessons.zero_stage_1.cuts import CASES, Case, Slices, plain

Place = tuple[int, int]  # where a parameter begins in the buffer, and its size
Layout = Callable[[Case, slice], list[Place]]
"""From a case and the rank's range: the place of each parameter, in the order of the slices."""
Cut = Callable[[Case], slice]
"""From a case: the rank's range of the buffer."""


def explained(answers: Mapping[Case, Any]) -> list[str]:
    """Return what explains all answers with the fewest mistakes: another layout, another cut, or both."""
    fits = [
        [why for why in pair if why]
        for pair in product(LAYOUTS, CUTS)
        if all(answers[case] == tuple(_slices(case, *pair)) for case in CASES)
    ]
    fewest = min(map(len, fits), default=0)
    return ["; besides, ".join(pair) for pair in fits if len(pair) == fewest] or _gaps(answers)


def _slices(case: Case, layout: str, cut: str) -> Slices:
    shard = CUTS[cut](case)
    return _in_shard(LAYOUTS[layout](case, shard), shard)


def _in_shard(parameters: list[Place], shard: slice) -> Slices:
    return plain((max(shard.start - at, 0), max(min(shard.stop - at, size), 0)) for at, size in parameters)


def _gaps(answers: Mapping[Case, Any]) -> list[str]:
    """Return whether parameters begin at multiples of a number, as zerolab's do, in shards of some length."""
    return [
        f"each parameter begins at a multiple of {of} elements, so there are gaps between them. In this "
        "exercise they follow each other without gaps, and the only padding is at the end"
        for of in (2, 4, 8, 16, 32, 64, 128, 256)
        if any(
            all(answers[case] == tuple(_with_gaps(case, of, length)) for case in CASES)
            for length in _LENGTHS_WITH_GAPS
        )
    ][:1]


def _with_gaps(case: Case, of: int, length: Callable[[Case, list[Place], int], int]) -> Slices:
    begins = [at for at, _ in _in_a_row([_up(size, of) for size in case.sizes])]
    parameters = list(zip(begins, case.sizes, strict=True))
    size = length(case, parameters, of)
    return _in_shard(parameters, slice(size * case.rank, size * (case.rank + 1)))


def _up(number: int, of: int) -> int:
    return -(-number // of) * of


def _share(numel: int, case: Case) -> int:
    return -(-numel // case.world_size)


# The shard's length where the last gap counts, where it does not, where no gap does, and where it is rounded.
_LENGTHS_WITH_GAPS: tuple[Callable[[Case, list[Place], int], int], ...] = (
    lambda c, p, of: _share(_up(sum(p[-1]), of), c),
    lambda c, p, of: _share(sum(p[-1]), c),
    lambda c, p, of: _share(c.numel, c),
    lambda c, p, of: _up(_share(sum(p[-1]), c), of),
)


def _in_a_row(sizes: list[int], begin: int = 0) -> list[Place]:
    return list(zip(accumulate(sizes, initial=begin), sizes, strict=False))


def _padding(case: Case) -> int:
    return -case.numel % case.world_size


def _sorted_in(case: Case, order: Callable[[int], int]) -> list[Place]:
    """Each parameter's place where they stand in another order; the slices are in the right one."""
    places, at = {}, 0
    for index in sorted(range(len(case.sizes)), key=order):
        places[index] = (at, case.sizes[index])
        at += case.sizes[index]
    return [places[index] for index in range(len(case.sizes))]


def _counted(case: Case, shard: slice, count: Callable[[int, int], int]) -> list[Place]:
    """The places where an offset grows by `count` of what is owned of a parameter, and of its size."""
    at, found = 0, []
    for size in case.sizes:
        found.append((at, size))
        at += count(max(min(shard.stop - at, size) - max(shard.start - at, 0), 0), size)
    return found


# fmt: off
LAYOUTS: Mapping[str, Layout] = {
    "": lambda c, s: _in_a_row(list(c.sizes)),
    "the padding stands in front of the parameters, so rank 0 owns fewer of their elements: it belongs at "
    "the end of the buffer":
        lambda c, s: _in_a_row(list(c.sizes), _padding(c)),
    "the padding stands behind the first parameter: it belongs at the end of the buffer":
        lambda c, s: [(at + _padding(c) * (index > 0), size)
                      for index, (at, size) in enumerate(_in_a_row(list(c.sizes)))],
    "the offset counts only parameters of which the rank owns something: add the size of each parameter, "
    "also of those that you skip":
        lambda c, s: _counted(c, s, lambda owned, size: size if owned else 0),
    "the offset counts the owned elements of a parameter, and not all of them: add its size":
        lambda c, s: _counted(c, s, lambda owned, size: owned),
    "the parameters were sorted by size, the smallest first: they stand in the buffer in the order of sizes":
        lambda c, s: _in_a_row(sorted(c.sizes)),
    "the parameters stand in the buffer by size, the smallest first: they stand in the order of the list":
        lambda c, s: _sorted_in(c, lambda index: c.sizes[index]),
    "the parameters stand in the buffer by size, the largest first: they stand in the order of the list":
        lambda c, s: _sorted_in(c, lambda index: -c.sizes[index]),
    "the last parameter stands first in the buffer: they stand in the order of the list":
        lambda c, s: _sorted_in(c, lambda index: -index),
    "the offset grows by 1 from parameter to parameter: it grows by the parameter's size":
        lambda c, s: list(enumerate(c.sizes)),
}


def _of_length(length: Callable[[Case], int], rank: Callable[[Case], int] = lambda c: c.rank) -> Cut:
    """The cut into shards of one length, of which a rank has its own or another."""
    return lambda case: slice(length(case) * rank(case), length(case) * (rank(case) + 1))


def _of_rank(rank: Callable[[Case], int]) -> Cut:
    return _of_length(lambda c: -(-c.numel // c.world_size), rank)


def _rest_last(case: Case) -> slice:
    """Shards of numel // N elements, of which the last ones are longer by one."""
    size, rest = divmod(case.numel, case.world_size)
    first = case.world_size - rest  # the first rank whose shard is longer
    begin = size * case.rank + max(case.rank - first, 0)
    return slice(begin, begin + size + (case.rank >= first))


LENGTHS: Mapping[str, Callable[[Case], int]] = {
    "max(sizes)": lambda c: max(c.sizes),
    "min(sizes)": lambda c: min(c.sizes),
    "sizes[0]": lambda c: c.sizes[0],
    "sizes[-1]": lambda c: c.sizes[-1],
    "sum(sizes) // len(sizes)": lambda c: c.numel // len(c.sizes),
    "ceil(sum(sizes) / len(sizes))": lambda c: -(-c.numel // len(c.sizes)),
    "len(sizes)": lambda c: len(c.sizes),
    "world_size": lambda c: c.world_size,
    "numel // world_size": lambda c: c.numel // c.world_size,
    "numel // world_size + 1": lambda c: c.numel // c.world_size + 1,
    "ceil(numel / world_size) + 1": lambda c: -(-c.numel // c.world_size) + 1,
    "ceil(numel / world_size) - 1": lambda c: -(-c.numel // c.world_size) - 1,
    "2 * ceil(numel / world_size)": lambda c: 2 * -(-c.numel // c.world_size),
    "ceil(numel / (world_size + 1))": lambda c: -(-c.numel // (c.world_size + 1)),
    "ceil(numel / (world_size - 1))": lambda c: -(-c.numel // max(c.world_size - 1, 1)),
    "numel // (world_size - 1)": lambda c: c.numel // max(c.world_size - 1, 1),
    "ceil(len(sizes) / world_size)": lambda c: -(-len(c.sizes) // c.world_size),
}
CUTS: Mapping[str, Cut] = {
    "": lambda c: c.shard,
    **{f"your shards have {name} elements: a shard has ceil(numel / world_size)": _of_length(length)
       for name, length in LENGTHS.items()},
    "the last shards are one longer than the first ones: round up, and the padding makes all shards equal":
        _rest_last,
    "the cuts are at numel * rank // world_size, so the shards differ by one element: round the length up, "
    "and begin at rank times the length":
        lambda c: slice(c.numel * c.rank // c.world_size, c.numel * (c.rank + 1) // c.world_size),
    "the slices go on behind the end of the shard: cut them off at (rank + 1) * shard":
        lambda c: slice(c.shard.start, c.numel),
    "the slices begin before the shard: cut them off at rank * shard":
        lambda c: slice(0, c.shard.stop),
    "these are the slices of rank + 2, counted modulo the number of ranks: rank r owns shard r":
        _of_rank(lambda c: (c.rank + 2) % c.world_size),
    "the ranks are exchanged in pairs (rank ^ 1): rank r owns shard r":
        _of_rank(lambda c: c.rank ^ 1),
    "the last element of the buffer belongs to no rank: an end is cut off at numel - 1":
        lambda c: slice(c.shard.start, min(c.shard.stop, c.numel - 1)),
}
# fmt: on
