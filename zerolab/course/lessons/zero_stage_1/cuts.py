"""Lesson 04's exercise on slices: models that are cut into shards, and the results of common mistakes."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from zerolab import ring

Slices = list[tuple[int, int]]  # one (start, stop) for each parameter; an empty slice is (0, 0)


class Case(NamedTuple):
    """The sizes of the parameters, the number of ranks, and the rank that is asked for."""

    sizes: tuple[int, ...]
    world_size: int
    rank: int

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    @property
    def offsets(self) -> list[int]:
        """Where each parameter begins in the flat buffer."""
        return list(accumulate(self.sizes, initial=0))[:-1]

    @property
    def shard(self) -> slice:
        """The rank's range of the padded buffer."""
        size = -(-self.numel // self.world_size)
        return slice(size * self.rank, size * (self.rank + 1))

    def __str__(self) -> str:
        return f"sizes {list(self.sizes)}, {self.world_size} ranks, rank {self.rank}"


_WORLDS = (
    ((6, 3, 7, 1), 3),
    ((120, 20, 80, 4), 4),
    ((10,), 4),
    ((2, 2, 2), 8),
    ((5, 5, 5, 5), 2),
    ((7, 9), 1),
    ((4, 5), 4),
    ((7, 4), 3),
    ((600, 401), 4),
)
CASES = [Case(sizes, world_size, rank) for sizes, world_size in _WORLDS for rank in range(world_size)]


def inside(case: Case, shard: slice | None = None) -> Slices:
    """Return the slice of each parameter that lies in a range of the buffer, the rank's shard by default."""
    shard = shard or case.shard
    pairs = zip(case.offsets, case.sizes, strict=True)
    return plain((max(shard.start - at, 0), max(min(shard.stop - at, size), 0)) for at, size in pairs)


def plain(pairs: Iterable[tuple[int, int]]) -> Slices:
    """The same slices, with (0, 0) for each empty one; a negative number counts from the end in Python."""
    return [(start, stop) if start < stop or min(start, stop) < 0 else (0, 0) for start, stop in pairs]


def _floor(case: Case, rest: int = 0) -> slice:
    """Return a shard of numel // N elements; the last rank's is longer by `rest`."""
    size = case.numel // case.world_size
    last = case.rank == case.world_size - 1
    return slice(size * case.rank, size * (case.rank + 1) + rest * last)


def _rest_first(case: Case) -> slice:
    """Return a shard of numel // N elements; rank 0's is longer by the rest."""
    size, rest = divmod(case.numel, case.world_size)
    return slice(size * case.rank + (rest if case.rank else 0), size * (case.rank + 1) + rest)


def _of_list(case: Case) -> Slices:
    """Whole parameters, an equal part of the list for each rank."""
    mine = ring.chunks(len(case.sizes), case.world_size)[case.rank]
    return [(0, size) if mine.start <= place < mine.stop else (0, 0) for place, size in enumerate(case.sizes)]


def _each_cut(case: Case) -> Slices:
    cuts = [ring.chunks(size, case.world_size)[case.rank] for size in case.sizes]
    return plain((cut.start, cut.stop) for cut in cuts)


def _padded_first(case: Case) -> Slices:
    """Where every parameter takes a multiple of N places in the buffer."""
    longer = case._replace(sizes=tuple(-(-size // case.world_size) * case.world_size for size in case.sizes))
    pairs = zip(inside(longer), case.sizes, strict=True)
    return plain((min(start, size), min(stop, size)) for (start, stop), size in pairs)


def _each_padded(case: Case) -> Slices:
    cuts = [(-(-size // case.world_size), size) for size in case.sizes]
    return plain((length * case.rank, min(length * (case.rank + 1), size)) for length, size in cuts)


def _one_of(case: Case, index: int) -> Slices:
    """Only the first slice that is not empty, or the last."""
    touched = [place for place, (_, stop) in enumerate(inside(case)) if stop]
    return [pair if place in touched[index:][:1] else (0, 0) for place, pair in enumerate(inside(case))]


def _dealt_out(case: Case) -> Slices:
    """From the first to the last of a parameter's elements, where elements go to the ranks in turn."""
    found = []
    for at, size in zip(case.offsets, case.sizes, strict=True):
        mine = [place for place in range(size) if (at + place) % case.world_size == case.rank]
        found.append((mine[0], mine[-1] + 1) if mine else (0, 0))
    return found


def _between_multiples(case: Case) -> Slices:
    """The slices where shards end at multiples of numel / N, each rounded to the nearest whole number."""
    start, stop = (round(case.numel * rank / case.world_size) for rank in (case.rank, case.rank + 1))
    return inside(case, slice(start, stop))


def _rounded_up(of: int, case: Case) -> Slices:
    """The slices where the length of a shard is rounded up to a multiple of so many elements."""
    shortest = -(-case.numel // case.world_size)
    size = -(-shortest // of) * of
    return inside(case, slice(size * case.rank, size * (case.rank + 1)))


# A sentence, and the slices that the mistake leads to.
# fmt: off
MISTAKES: dict[str, Callable[[Case], Slices]] = {
    "the length numel // N rounds down, so the last elements have no owner: round up, and the padding makes "
    "the shards equal":
        lambda c: inside(c, _floor(c)),
    "the last rank takes the remainder, so its shard is longer: round up, and all shards are equal":
        lambda c: inside(c, _floor(c, c.numel % c.world_size)),
    "the first shards are one longer than the rest, as ring.chunks cuts: this buffer is padded, and all its "
    "shards are equal":
        lambda c: inside(c, ring.chunks(c.numel, c.world_size)[c.rank]),
    "these are positions in the flat buffer: count from each parameter's own first element, so subtract the "
    "parameter's offset":
        lambda c: plain((start + at, stop + at) if stop else (0, 0)
                        for (start, stop), at in zip(inside(c), c.offsets, strict=True)),
    "these are positions in the shard: count from each parameter's own first element":
        lambda c: plain((start + at - c.shard.start, stop + at - c.shard.start) if stop else (0, 0)
                        for (start, stop), at in zip(inside(c), c.offsets, strict=True)),
    "a slice ends where the shard ends, behind its parameter's last element or before its first: cut it off "
    "at the parameter's size and at 0":
        lambda c: plain((max(c.shard.start - at, 0), c.shard.stop - at) for at in c.offsets),
    "a slice ends where the shard ends, behind its parameter's last element: cut it off at the parameter's "
    "size":
        lambda c: plain((max(c.shard.start - at, 0), max(c.shard.stop - at, 0)) for at in c.offsets),
    "a slice begins where the shard begins, before its parameter's first element, at a negative number: "
    "begin at 0 or later":
        lambda c: plain((c.shard.start - at, min(c.shard.stop - at, size))
                        for at, size in zip(c.offsets, c.sizes, strict=True)),
    "a parameter behind the shard gets a negative stop, and [0:-2] is not empty: it leaves out the last two. "
    "Make empty slices (0, 0)":
        lambda c: [(max(c.shard.start - at, 0), min(c.shard.stop - at, size))
                   for at, size in zip(c.offsets, c.sizes, strict=True)],
    "each parameter that the shard touches is there whole: a cut may go through the middle of a parameter":
        lambda c: [(0, size if stop else 0) for (_, stop), size in zip(inside(c), c.sizes, strict=True)],
    "that cuts the list of parameters: cut the flat buffer":
        _of_list,
    "whole parameters are dealt out to the ranks in turn: cut the flat buffer":
        lambda c: [(0, size if place % c.world_size == c.rank else 0) for place, size in enumerate(c.sizes)],
    "each parameter is cut into N parts, which is FSDP2's way: here one flat buffer of all parameters is cut":
        _each_cut,
    "each parameter is padded by itself before it goes into the buffer: padding stands at the end of the "
    "buffer only":
        _padded_first,
    "the length numel // N + 1 is one too many where N divides numel: round up with -(-numel // N)":
        lambda c: inside(c, slice((size := c.numel // c.world_size + 1) * c.rank, size * (c.rank + 1))),
    "each parameter is padded and cut into N parts, which is FSDP2's way: here one flat buffer of all "
    "parameters is cut":
        _each_padded,
    "stop is one too small: it is the first element that is not in the slice, as in Python":
        lambda c: [(start, max(stop - 1, 0)) for start, stop in inside(c)],
    "that is (start, length): return (start, stop)":
        lambda c: [(start, stop - start) for start, stop in inside(c)],
    "these are the slices of the next rank":
        lambda c: inside(c._replace(rank=(c.rank + 1) % c.world_size)),
    "these are the slices of the previous rank: ranks begin with 0":
        lambda c: inside(c._replace(rank=c.rank - 1)),
    "rank r has the shard of rank r + 1, and the last rank has none: ranks begin with 0":
        lambda c: inside(c, slice(c.shard.stop, 2 * c.shard.stop - c.shard.start)),
    "each slice begins at 0: its length is right, and its start is lost":
        lambda c: [(0, stop - start) for start, stop in inside(c)],
    "where the shard begins inside a parameter, its slice goes on to the end of the parameter: it ends where "
    "the shard ends, min(stop, size)":
        lambda c: [(start, size if start else stop)
                   for (start, stop), size in zip(inside(c), c.sizes, strict=True)],
    "these are the slices of the previous rank, and rank 0 has those of the last: rank r owns shard r":
        lambda c: inside(c._replace(rank=(c.rank - 1) % c.world_size)),
    "the length numel / N is rounded to the nearest whole number, which may be below it: round up, and the "
    "padding makes the shards equal":
        lambda c: inside(c, slice((size := round(c.numel / c.world_size)) * c.rank, size * (c.rank + 1))),
    "the shards end at multiples of numel / N, each rounded, so their lengths differ: round the length up "
    "once, and shard r begins at r times that":
        _between_multiples,
    "the elements go to the ranks in turn, and a slice reaches from a rank's first element to "
    "its last: cut the buffer, so that each rank has one piece of it":
        _dealt_out,
    "each shard begins and ends one element too late: shard r begins at r times its length":
        lambda c: inside(c, slice(c.shard.start + 1, c.shard.stop + 1)),
    "each shard begins and ends one element too early: shard r begins at r times its length":
        lambda c: inside(c, slice(c.shard.start - 1, c.shard.stop - 1)),
    "each shard is one element too long, so two ranks own the first element of the next: the stop of one "
    "shard is the start of the next":
        lambda c: inside(c, slice(c.shard.start, c.shard.stop + 1)),
    "each shard begins one element too late, so no rank owns its first: the stop of one shard is the start "
    "of the next":
        lambda c: inside(c, slice(c.shard.start + 1, c.shard.stop)),
    "each shard ends one element too early, so no rank owns its last: the stop of one shard is the start of "
    "the next":
        lambda c: inside(c, slice(c.shard.start, c.shard.stop - 1)),
    "every rank owns everything: that is stage 0":
        lambda c: [(0, size) for size in c.sizes],
    "every rank owns the first shard: use rank":
        lambda c: inside(c._replace(rank=0)),
    "every parameter is cut as if it were the first in the buffer: add up the sizes of those before it":
        lambda c: plain((min(c.shard.start, size), min(c.shard.stop, size)) for size in c.sizes),
    "the parameters without an element here are left out. Keep an empty slice for each: otherwise slices and "
    "parameters no longer match":
        lambda c: [pair for pair in inside(c) if pair != (0, 0)],
    "the ranks are in reverse order: rank 0 owns the first shard":
        lambda c: inside(c._replace(rank=c.world_size - 1 - c.rank)),
    "rank 0 takes the remainder, so its shard is longer: round up, and all shards are equal":
        lambda c: inside(c, _rest_first(c)),
    "the parameters were sorted by size: they stand in the buffer in the order of sizes":
        lambda c: inside(c._replace(sizes=tuple(sorted(c.sizes, reverse=True)))),
    "each offset is one parameter too far: a parameter begins where the ones before it end":
        lambda c: plain((max(c.shard.start - at - size, 0), max(min(c.shard.stop - at - size, size), 0))
                        for at, size in zip(c.offsets, c.sizes, strict=True)),
    "only the first parameter that the shard touches has a slice: go on until the shard is full":
        lambda c: _one_of(c, 0),
    "only the last parameter that the shard touches has a slice: keep the slices of those before it":
        lambda c: _one_of(c, -1),
    "starts and stops are 4 times too large, as if they were numbers of bytes: count elements":
        lambda c: [(4 * start, 4 * stop) for start, stop in inside(c)],
    "the slices are in the reverse order of the parameters":
        lambda c: inside(c)[::-1],
}
# fmt: on
MISTAKES |= {
    f"a shard's length is rounded up to a multiple of {of}, which nothing needs here": partial(
        _rounded_up, of
    )
    for of in (2, 4, 8, 16, 32, 64, 128, 256)
}
