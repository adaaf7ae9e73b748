"""Lesson 04's exercise on slices: other buffers, other cuts, other ends and other containers are named."""

import pytest
from support.answers import together
from support.lessons import solutions_travel_by_value

from zerolab.course.lessons.zero_stage_1 import check_owned

solutions_travel_by_value(__name__)


def up(numel, parts):
    return -(-numel // parts)


def length_of(sizes, n):
    return up(sum(sizes), n)


def cut(sizes, n, rank, length=length_of, places=None, begin=None, end=None):
    """The right slices, with knobs for the length of a shard, its ends, and where parameters begin."""
    size, found = length(sizes, n), []
    begin, end = size * rank if begin is None else begin, size * (rank + 1) if end is None else end
    for at, numel in zip(places or starts(sizes), sizes, strict=True):
        start, stop = max(begin - at, 0), min(end - at, numel)
        found.append((start, stop) if start < stop else (0, 0))
    return found


def starts(sizes, begin=0):
    return [begin + sum(sizes[:index]) for index in range(len(sizes))]


def padding(sizes, n):
    return -sum(sizes) % n


def padding_first(sizes, n, rank, length=length_of):
    return cut(sizes, n, rank, length, starts(sizes, padding(sizes, n)))


def padding_behind_the_first(sizes, n, rank):
    first, *others = starts(sizes)
    return cut(sizes, n, rank, places=[first, *(at + padding(sizes, n) for at in others)])


def counted(sizes, n, rank, count):
    """The offset grows by `count` of the owned elements and of the size."""
    shard, found, at = length_of(sizes, n), [], 0
    for size in sizes:
        start, stop = max(rank * shard - at, 0), min((rank + 1) * shard - at, size)
        found.append((start, stop) if start < stop else (0, 0))
        at += count(max(stop - start, 0), size)
    return found


def from_the_last(sizes, n, rank):
    return cut(sizes[::-1], n, rank)[::-1]


def smallest_first(sizes, n, rank):
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    slices = dict(zip(order, cut(sorted(sizes), n, rank), strict=True))
    return [slices[index] for index in range(len(sizes))]


def rest_last(sizes, n, rank):
    size, rest = divmod(sum(sizes), n)
    lengths = [size + (each >= n - rest) for each in range(n)]
    return cut(sizes, n, rank, begin=sum(lengths[:rank]), end=sum(lengths[: rank + 1]))


def proportional(sizes, n, rank):
    total = sum(sizes)
    return cut(sizes, n, rank, begin=total * rank // n, end=total * (rank + 1) // n)


def exchanged(sizes, n, rank):
    return cut(sizes, rank, n) if rank else [(0, size) for size in sizes]


def ends(change, empty=False):
    """Each slice that is not empty, or each one, changed by change(start, stop, size, rank, n)."""

    def owned(sizes, n, rank):
        return [
            change(start, stop, size, rank, n) if empty or stop else (0, 0)
            for (start, stop), size in zip(cut(sizes, n, rank), sizes, strict=True)
        ]

    return owned


def start_without_offset(sizes, n, rank):
    shard = length_of(sizes, n)
    stops = [min((rank + 1) * shard - at, size) for at, size in zip(starts(sizes), sizes, strict=True)]
    return [(rank * shard, stop) if rank * shard < stop else (0, 0) for stop in stops]


def stop_without_offset(sizes, n, rank):
    shard, found = length_of(sizes, n), []
    for at, size in zip(starts(sizes), sizes, strict=True):
        start, stop = max(rank * shard - at, 0), min(shard, size)
        found.append((start, stop) if start < stop else (0, 0))
    return found


def one_of(index):
    def owned(sizes, n, rank):
        slices = cut(sizes, n, rank)
        touched = [place for place, (_, stop) in enumerate(slices) if stop]
        return [pair if place in touched[index:][:1] else (0, 0) for place, pair in enumerate(slices)]

    return owned


def not_at_the_beginning(sizes, n, rank):
    """Nobody expects this: a parameter that begins where the shard begins is left out."""
    begin = length_of(sizes, n) * rank
    pairs = zip(starts(sizes), cut(sizes, n, rank), strict=True)
    return [(0, 0) if at == begin else pair for at, pair in pairs]


def one_rank_too_far(sizes, n, rank):
    return cut(sizes, n, rank, end=[length_of(sizes, n) * each for each in range(n)][rank + 1])


def as_list(sizes, n, rank):
    return [list(pair) for pair in cut(sizes, n, rank)]


def empty_where_it_falls(sizes, n, rank):
    """Right: an empty slice such as (6, 3)."""
    shard = length_of(sizes, n)
    pairs = zip(starts(sizes), sizes, strict=True)
    return [(max(rank * shard - at, 0), max(min((rank + 1) * shard - at, size), 0)) for at, size in pairs]


def of_length(length):
    return lambda sizes, n, rank: cut(sizes, n, rank, length)


RIGHT = [as_list, empty_where_it_falls]


def with_gaps(of, behind_the_last, whole_shards):
    """zerolab's own layout: parameters begin at multiples of `of` elements."""

    def owned(sizes, n, rank):
        begins, at = [], 0
        for size in sizes:
            begins.append(at)
            at += up(size, of) * of
        numel = at if behind_the_last else begins[-1] + sizes[-1]
        length = up(up(numel, n), of) * of if whole_shards else up(numel, n)
        pairs = [
            (max(length * rank - begin, 0), min(length * (rank + 1) - begin, size))
            for begin, size in zip(begins, sizes, strict=True)
        ]
        return [pair if pair[0] < pair[1] else (0, 0) for pair in pairs]

    return owned


GAPS = [(16, True, False), (16, False, False), (16, True, True), (4, True, False), (64, False, False)]
WRONG = [
    (padding_first, "the padding stands in front of the parameters, so rank 0 owns fewer"),
    (padding_behind_the_first, "the padding stands behind the first parameter"),
    (
        lambda sizes, n, rank: padding_first(sizes, n, rank, lambda sizes, n: max(sizes)),
        "it belongs at the end of the buffer; besides, your shards have max(sizes) elements",
    ),
    (lambda s, n, r: counted(s, n, r, lambda owned, size: size * bool(owned)), "of which the rank owns some"),
    (
        lambda s, n, r: counted(s, n, r, lambda owned, size: owned),
        "the offset counts the owned elements of a",
    ),
    (from_the_last, "the last parameter stands first in the buffer"),
    (smallest_first, "the parameters stand in the buffer by size, the smallest first"),
    (lambda sizes, n, rank: cut(sorted(sizes), n, rank), "the parameters were sorted by size, the smallest"),
    (
        of_length(lambda sizes, n: max(sizes)),
        "your shards have max(sizes) elements: a shard has ceil(numel /",
    ),
    (of_length(lambda sizes, n: up(sum(sizes), n + 1)), "your shards have ceil(numel / (world_size + 1))"),
    (
        of_length(lambda sizes, n: up(sum(sizes), max(n - 1, 1))),
        "your shards have ceil(numel / (world_size - ",
    ),
    (of_length(lambda sizes, n: 2 * length_of(sizes, n)), "your shards have 2 * ceil(numel / world_size)"),
    (of_length(lambda sizes, n: sum(sizes) // len(sizes)), "your shards have sum(sizes) // len(sizes)"),
    (rest_last, "the last shards are one longer than the first ones"),
    (proportional, "the cuts are at numel * rank // world_size"),
    (lambda s, n, r: cut(s, n, r, end=sum(s)), "the slices go on behind the end of the shard"),
    (lambda s, n, r: cut(s, n, r, begin=0), "the slices begin before the shard"),
    (lambda s, n, r: cut(s, n, (r + 2) % n), "these are the slices of rank + 2"),
    (exchanged, "rank 0 owns all elements, and no other rank owns any"),
    (lambda sizes, n, rank: cut(sizes, rank, n), "rank is 0 on the first rank: divide by world_size"),
    (ends(lambda start, stop, size, rank, n: (start + 1, stop)), "each start is one too large"),
    (
        ends(lambda start, stop, size, rank, n: (min(rank, size), size), empty=True),
        "each start is rank: a shard",
    ),
    (
        ends(lambda start, stop, size, rank, n: (min(rank, size), size), empty=True),
        "it begins at rank * shard; each stop is the parameter's size (seen with",
    ),
    (
        ends(lambda start, stop, size, rank, n: (4 * start, 4 * stop)),
        "stops are 4 times too large",
    ),
    (start_without_offset, "each start is counted from the beginning of the buffer"),
    (stop_without_offset, "each stop is min(length, size), where `length` is that of a shard"),
    (one_of(0), "only the first parameter that the shard touches has a slice"),
    (one_of(-1), "only the last parameter that the shard touches has a slice"),
    (
        not_at_the_beginning,
        "no rank owns element 0 of parameter 0: each element has one owner; rank 0's slices have 0 elements "
        "together, and its shard holds 6 elements of parameters; the slice of parameter 0 is (0, 0), and "
        "right is (0, 6); "
        "slices are wrong wherever the parameter begins exactly where the shard begins, and nowhere else",
    ),
    *((with_gaps(*gaps), f"each parameter begins at a multiple of {gaps[0]} elements") for gaps in GAPS),
    (with_gaps(*GAPS[0]), "they follow each other without gaps, and the only padding is at the end"),
    (one_rank_too_far, "with sizes [6, 3, 7, 1], 3 ranks, rank 2 (line"),
    (
        lambda sizes, n, rank: [cut(sizes, n, each) for each in range(n)],
        "your function returned the slices of all ranks: return those of rank 0 alone",
    ),
    (lambda s, n, r: [end for pair in cut(s, n, r) for end in pair], "the starts and stops in one flat list"),
    (lambda s, n, r: tuple(map(list, zip(*cut(s, n, r), strict=True))), "returned all starts, and then all"),
    (
        lambda s, n, r: (length_of(s, n) * r, length_of(s, n) * (r + 1)),
        "the range of the shard in the buffer",
    ),
    (lambda s, n, r: [stop - start for start, stop in cut(s, n, r)], "your function returned lengths"),
    (lambda s, n, r: [[*range(*pair)] for pair in cut(s, n, r)], "returned the numbers of the elements"),
    (lambda s, n, r: [(r, *pair) for pair in cut(s, n, r)], "a number in front of start and stop, (0, 0, 6)"),
    (
        lambda s, n, r: [pair if pair[1] else None for pair in cut(s, n, r)],
        "returned None for a parameter: an",
    ),
    (lambda s, n, r: None if r else cut(s, n, r), "returned None, and for other ranks a list"),
]
slices_of = together(check_owned, [*RIGHT, *(wrong for wrong, _ in WRONG)])


@pytest.mark.parametrize("right", RIGHT)
def test_every_container_of_two_numbers_passes(right):
    assert slices_of(right) is None


@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_other_buffers_cuts_and_ends_are_named(wrong, words):
    assert words in slices_of(wrong)
