"""Lesson 04's exercise on slices: what the starts and the stops of all slices are, each taken by itself."""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, NamedTuple

from zerolab.course.lessons.zero_stage_1.cuts import CASES, Case, Slices, plain


class At(NamedTuple):
    """What a start or a stop may be computed from: one parameter of a case, and the rank's shard.

    Attributes:
        first, last: the ends of the shard in the buffer.
        offset, size: where the parameter begins in the buffer, and its size.
    """

    case: Case
    first: int
    last: int
    offset: int
    size: int

    @property
    def start(self) -> int:
        return min(max(self.first - self.offset, 0), self.size)

    @property
    def stop(self) -> int:
        return min(max(self.last - self.offset, 0), self.size)


End = Callable[[At], int]
RIGHT = ""
# fmt: off
STARTS: Mapping[str, End] = {
    RIGHT: lambda a: a.start,
    "each start is rank: a shard is one run of neighbouring elements, and it begins at rank * shard":
        lambda a: a.case.rank,
    "each start is 0": lambda a: 0,
    "each start is one too large: elements are counted from 0": lambda a: a.start + 1,
    "each start is one too small: that element belongs to the rank before": lambda a: max(a.start - 1, 0),
    "each start is counted from the beginning of the buffer: subtract the parameter's offset":
        lambda a: max(a.first, 0),
    "each start is counted from the beginning of the buffer, and cut off at the size: subtract the "
    "parameter's offset": lambda a: min(a.first, a.size),
    "each start is a position in the buffer: subtract the parameter's offset": lambda a: a.start + a.offset,
    "each start is a position in the shard: count from the parameter's own first element":
        lambda a: max(a.offset - a.first, 0),
    "each start is the parameter's offset": lambda a: a.offset,
}
STOPS: Mapping[str, End] = {
    RIGHT: lambda a: a.stop,
    "each stop is the parameter's size": lambda a: a.size,
    "each stop is one too large": lambda a: a.stop + 1,
    "each stop is one too small: it is the first element that is not in the slice, as in Python":
        lambda a: a.stop - 1,
    "each stop is the end of the shard in the buffer: subtract the parameter's offset": lambda a: a.last,
    "each stop is min(last, size), where the shard ends at `last` in the buffer: subtract the parameter's "
    "offset from last": lambda a: min(a.last, a.size),
    "each stop is min(length, size), where `length` is that of a shard: where the shard ends has to count, "
    "min(last - offset, size)": lambda a: min(a.last - a.first, a.size),
    "each stop is the length of a shard": lambda a: a.last - a.first,
    "each stop is a position in the buffer: subtract the parameter's offset": lambda a: a.stop + a.offset,
    "each stop is a position in the shard: count from the parameter's own first element":
        lambda a: max(min(a.offset + a.size, a.last) - a.first, 0),
    "each stop is the length of the slice: add the start": lambda a: a.stop - a.start,
    "each stop is the start plus the length of a shard, also where the parameter begins behind the shard's "
    "beginning": lambda a: min(a.start + a.last - a.first, a.size),
}
# fmt: on


def explained(answers: Mapping[Case, Any]) -> list[str]:
    """Return what the starts and stops of all answers are, where the same is true of each slice.

    Empty slices may be computed in the same way, or made (0, 0) beforehand.
    """
    fits = [
        [why for why in (start, stop) if why]
        for start, stop, before in product(STARTS, STOPS, (True, False))
        if all(answers[case] == tuple(_slices(case, start, stop, before)) for case in CASES)
    ]
    fewest = min(map(len, fits), default=0)
    return list(dict.fromkeys("; ".join(pair) for pair in fits if len(pair) == fewest))


def places(case: Case) -> list[At]:
    """Return each parameter of a case, with the rank's shard."""
    pairs = zip(case.offsets, case.sizes, strict=True)
    return [At(case, case.shard.start, case.shard.stop, at, size) for at, size in pairs]


def _slices(case: Case, start: str, stop: str, empty_first: bool) -> Slices:
    return plain(
        (0, 0) if empty_first and at.start >= at.stop else (STARTS[start](at), STOPS[stop](at))
        for at in places(case)
    )
