"""Lesson 04's exercise on slices: whatever the style, right answers pass, and each mistake is named."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.answers import alone, together
from support.lessons import solutions_travel_by_value

from zerolab import ring
from zerolab.course.lessons.zero_stage_1 import check_owned
from zerolab.course.lessons.zero_stage_1.solution import owned_slices

solutions_travel_by_value(__name__)


def up(numel, parts):
    return (numel + parts - 1) // parts


def clipped(sizes, n, rank, length=None, clip=min):
    """The right slices, as Python's own slice objects; `length` and `clip` make mistakes of it."""
    size, at, found = length or up(sum(sizes), n), 0, []
    for numel in sizes:
        low, high = max(rank * size - at, 0), clip((rank + 1) * size - at, numel)
        found.append(slice(low, high) if low < high else slice(0, 0))
        at += numel
    return found


def by_element(sizes, n, rank):
    """Right: asks of each element whether it is in the shard."""
    mine = range(rank * up(sum(sizes), n), (rank + 1) * up(sum(sizes), n))
    found, at = [], 0
    for numel in sizes:
        own = [element for element in range(numel) if at + element in mine]
        found.append((own[0], own[-1] + 1) if own else (numel, numel))
        at += numel
    return tuple(found)


def by_tensor(sizes, n, rank):
    """Right: numbers of torch's, ranges, and the empty slice wherever it falls."""
    ends = torch.tensor(sizes).cumsum(0)
    starts, size = ends - torch.tensor(sizes), up(sum(sizes), n)
    low = (rank * size - starts).clamp(min=0).minimum(torch.tensor(sizes))
    high = ((rank + 1) * size - starts).clamp(min=0).minimum(torch.tensor(sizes))
    return [range(int(a), int(b)) for a, b in zip(low, high, strict=True)]


def floor(sizes, n, rank):
    size = sum(sizes) // n
    return [(s.start, s.stop) for s in clipped(sizes, n, rank, size)] if size else [(0, 0)] * len(sizes)


def between_multiples(sizes, n, rank, whole):
    low, high = (whole(end * sum(sizes) / n) for end in (rank, rank + 1))
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    ends = [(max(low - at, 0), min(high - at, numel)) for at, numel in zip(starts, sizes, strict=True)]
    return [end if end[0] < end[1] else (0, 0) for end in ends]


def dealt_out(sizes, n, rank):
    found, at = [], 0
    for numel in sizes:
        own = [element for element in range(numel) if (at + element) % n == rank]
        found.append((own[0], own[-1] + 1) if own else (0, 0))
        at += numel
    return found


def in_the_buffer(sizes, n, rank):
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [
        (s.start + at, s.stop + at) if s.stop else (0, 0)
        for s, at in zip(clipped(sizes, n, rank), starts, strict=True)
    ]


def uneven(sizes, n, rank):
    cut, at, found = ring.chunks(sum(sizes), n)[rank], 0, []
    for numel in sizes:
        low, high = max(cut.start - at, 0), min(cut.stop - at, numel)
        found.append((low, high) if low < high else (0, 0))
        at += numel
    return found


def not_cut_off(sizes, n, rank):
    return clipped(sizes, n, rank, clip=lambda end, _: end)


def never_empty(sizes, n, rank):
    size, at, found = up(sum(sizes), n), 0, []
    for numel in sizes:
        found.append((max(rank * size - at, 0), min((rank + 1) * size - at, numel)))
        at += numel
    return found


def without_empty(sizes, n, rank):
    return [s for s in clipped(sizes, n, rank) if s.stop]


def whole(sizes, n, rank):
    return [(0, numel if s.stop else 0) for s, numel in zip(clipped(sizes, n, rank), sizes, strict=True)]


def the_list(sizes, n, rank):
    mine = ring.chunks(len(sizes), n)[rank]
    return [
        (0, numel) if place in range(mine.start, mine.stop) else (0, 0) for place, numel in enumerate(sizes)
    ]


def each_by_itself(sizes, n, rank):
    return [(cut.start, cut.stop) for cut in (ring.chunks(numel, n)[rank] for numel in sizes)]


def lengths(sizes, n, rank):
    return [(s.start, s.stop - s.start) for s in clipped(sizes, n, rank)]


def last_element(sizes, n, rank):
    return [(s.start, max(s.stop - 1, 0)) for s in clipped(sizes, n, rank)]


def a_gap(sizes, n, rank):
    """Nobody expects this one: every slice but the first begins one late."""
    return [(s.start + (place > 0), s.stop) for place, s in enumerate(clipped(sizes, n, rank))]


def overlapping(sizes, n, rank):
    return [(max(s.start - 1, 0), s.stop) for s in clipped(sizes, n, rank)]


def one_place_more(sizes, n, rank):
    return clipped(sizes, n, rank, sum(sizes) // n + 1)


def padded_parameters(sizes, n, rank):
    longer = [up(numel, n) * n for numel in sizes]
    return [
        (min(s.start, numel), min(s.stop, numel))
        for s, numel in zip(clipped(longer, n, rank), sizes, strict=True)
    ]


def nobodys_last(sizes, n, rank):
    return [*clipped(sizes, n, rank)[:-1], (0, 0)]


def offset_of_the_next(sizes, n, rank):
    size, at, found = up(sum(sizes), n), 0, []
    for numel in sizes:
        at += numel
        low, high = max(rank * size - at, 0), min((rank + 1) * size - at, numel)
        found.append((low, high) if low < high else (0, 0))
    return found


def rest_first(sizes, n, rank):
    size, rest = divmod(sum(sizes), n)
    low, high, at, found = (rank * size + rest if rank else 0), (rank + 1) * size + rest, 0, []
    for numel in sizes:
        start, stop = max(low - at, 0), min(high - at, numel)
        found.append((start, stop) if start < stop else (0, 0))
        at += numel
    return found


def by_size(sizes, n, rank):
    return clipped(sorted(sizes, reverse=True), n, rank)


def stop_first(sizes, n, rank):
    return [(s.stop, s.start) for s in clipped(sizes, n, rank)]


def one_too_many(sizes, n, rank):
    return [*clipped(sizes, n, rank), (0, 0)]


def never_cut_off(sizes, n, rank):
    size, at, found = -(-sum(sizes) // n), 0, []
    for each in sizes:
        found.append((rank * size - at, (rank + 1) * size - at))
        at += each
    return found


def next_and_never_cut_off(sizes, n, rank):
    return never_cut_off(sizes, n, (rank + 1) % n)


def where_it_begins(sizes, n, rank, of=lambda at, each: at):
    size, at, found = -(-sum(sizes) // n), 0, []
    for each in sizes:
        found.append((0, each) if of(at, each) // size == rank else (0, 0))
        at += each
    return found


def where_it_ends(sizes, n, rank):
    return where_it_begins(sizes, n, rank, lambda at, each: at + each - 1)


def largest_first(sizes, n, rank):
    """Each parameter goes to the rank that has least so far, the largest first."""
    loads, owner = [0] * n, {}
    for place in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        owner[place] = loads.index(min(loads))
        loads[owner[place]] += sizes[place]
    return [(0, size) if owner[place] == rank else (0, 0) for place, size in enumerate(sizes)]


def of_length(length, first=0, last=0):
    """Shards of another length, or with ends that are moved; `length` is a function of numel and N."""

    def owned(sizes, n, rank):
        size, at, found = length(sum(sizes), n), 0, []
        for each in sizes:
            start, stop = max(rank * size + first - at, 0), min((rank + 1) * size + last - at, each)
            found.append((start, stop) if start < stop else (0, 0))
            at += each
        return found

    return owned


def rounded_up(numel, n, of=1):
    """The shortest shard, rounded up to a multiple of `of` elements."""
    return -(-numel // (n * of)) * of


SLICES_RIGHT = [
    clipped,
    by_element,
    by_tensor,
    lambda sizes, n, rank: np.array(by_element(sizes, n, rank)),
    lambda sizes, n, rank: torch.tensor(by_element(sizes, n, rank)),
]


def skipped_elements_count(sizes, n, rank):
    """What belongs to the ranks before is taken from this rank's elements, too."""
    size, found = -(-sum(sizes) // n), []
    skip, left = size * rank, size
    for each in sizes:
        start, stop = min(skip, each), min(left, each)
        skip, left = skip - start, left - stop
        found.append((start, stop) if start < stop else (0, 0))
    return found


def begins_or_ends_inside(sizes, n, rank):
    """The case is missing in which the shard lies inside one parameter."""
    size, at, found = -(-sum(sizes) // n), 0, []
    for each in sizes:
        first, last = size * rank - at, size * (rank + 1) - at
        found.append(
            (0, min(each, last)) if first <= 0 < last else (max(first, 0), each) if each <= last else (0, 0)
        )
        found[-1] = found[-1] if found[-1][0] < found[-1][1] else (0, 0)
        at += each
    return found


def changed(sizes, n, rank, change):
    return [change(start, stop, size) if stop else (0, 0)
            for (start, stop), size in zip(by_element(sizes, n, rank), sizes, strict=True)]  # fmt: skip


SLICES_WRONG = [
    (skipped_elements_count, "all slices of ranks above 0 are empty"),
    (begins_or_ends_inside, "where the shard lies inside one parameter, all slices are empty"),
    (lambda sizes, n, rank: changed(sizes, n, rank, lambda a, b, size: (0, b - a)), "each slice begins at 0"),
    (
        lambda sizes, n, rank: changed(sizes, n, rank, lambda a, b, size: (a, size if a else b)),
        "its slice goes on to the end of the parameter",
    ),
    (lambda sizes, n, rank: clipped(sizes, n, rank + 1), "rank r has the shard of rank r + 1, and the last"),
    (lambda sizes, n, rank: clipped(sizes, n, (rank - 1) % n), "and rank 0 has those of the last"),
    (of_length(lambda numel, n: round(numel / n)), "rounded to the nearest whole number"),
    (of_length(rounded_up, first=1, last=1), "each shard begins and ends one element too late"),
    (of_length(rounded_up, first=-1, last=-1), "each shard begins and ends one element too early"),
    (of_length(rounded_up, last=1), "each shard is one element too long"),
    (of_length(rounded_up, last=-1), "each shard ends one element too early"),
    (of_length(rounded_up, first=1), "each shard begins one element too late"),
    *((of_length(partial(rounded_up, of=of)), f"rounded up to a multiple of {of},") for of in (2, 8, 16, 64)),
    (lambda sizes, n, rank: None, "not written yet"),
    (
        alone(lambda sizes, n, rank: print(sizes)),
        "your function prints something and returns None: return the result",
    ),
    (
        lambda sizes, n, rank: owned_slices(sizes, dist.get_world_size(), dist.get_rank()),
        "your function calls dist.get_rank() and dist.get_world_size(). The check calls it in one process, "
        "once for each rank, so use the arguments rank and world_size",
    ),
    (lambda sizes, n, rank: {}, "returned dict {}: return a list with one (start, stop)"),
    (lambda sizes, n, rank: [None for _ in sizes], "returned None for a parameter"),
    (lambda sizes, n, rank: [(0.5, 1) for _ in sizes], "a slice that is not of whole numbers, (0.5, 1)"),
    (floor, "numel // N rounds down"),
    (uneven, "the first shards are one longer than the rest"),
    (in_the_buffer, "these are positions in the flat buffer"),
    (not_cut_off, "a slice ends where the shard ends, behind its parameter's last element"),
    (never_empty, "gets a negative stop, and [0:-2] is not empty"),
    (without_empty, "Keep an empty slice for each"),
    (whole, "is there whole: a cut may go through the middle"),
    (the_list, "that cuts the list of parameters"),
    (each_by_itself, "which is FSDP2's way"),
    (lengths, "that is (start, length)"),
    (last_element, "stop is one too small"),
    (lambda sizes, n, rank: clipped(sizes, n, rank - 1), "previous rank: ranks begin with 0"),
    (lambda sizes, n, rank: clipped(sizes, n, 0), "use rank"),
    (lambda sizes, n, rank: clipped(sizes, n, rank)[::-1], "reverse order"),
    (a_gap, "no rank owns element 0 of parameter 1"),
    (overlapping, "each start is one too small: that element belongs to the rank before"),
    (one_place_more, "numel // N + 1 is one too many where N divides numel"),
    (padded_parameters, "each parameter is padded by itself"),
    (nobodys_last, "no rank owns element 0 of parameter 3"),
    (offset_of_the_next, "each offset is one parameter too far"),
    (rest_first, "rank 0 takes the remainder"),
    (by_size, "the parameters were sorted by size"),
    (stop_first, "that is (stop, start)"),
    (lambda sizes, n, rank: clipped(sizes, n, n - 1 - rank), "the ranks are in reverse order"),
    (one_too_many, "your list has 5 slices for 4 parameters"),
    (
        never_cut_off,
        "(-6, 0), and the parameter has the elements 0 to 3: cut both ends off at 0 and at 3. That makes",
    ),
    (where_it_begins, "dealt out whole, here to the rank whose shard has its first element"),
    (where_it_ends, "dealt out whole, here to the rank whose shard has its last element"),
    (largest_first, "every parameter is dealt out whole, so the ranks' parts are not equal"),
    (next_and_never_cut_off, "Besides, these are the slices of the next rank"),
    (lambda sizes, n, rank: sizes[rank + 9], "your function stopped with IndexError"),
    (
        partial(between_multiples, whole=round),
        "multiples of numel / N, each rounded, so their lengths differ",
    ),
    (partial(between_multiples, whole=int), "the cuts are at numel * rank // world_size"),
    (dealt_out, "the elements go to the ranks in turn, and a slice reaches from"),
]
slices_of = together(check_owned, [*SLICES_RIGHT, *(wrong for wrong, _ in SLICES_WRONG)])


@pytest.mark.parametrize("right", SLICES_RIGHT)
def test_right_slices_pass_however_they_are_written(right):
    assert slices_of(right) is None


@pytest.mark.parametrize(("wrong", "words"), SLICES_WRONG)
def test_wrong_slices_are_named(wrong, words):
    assert words in slices_of(wrong)
