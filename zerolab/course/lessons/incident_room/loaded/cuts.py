"""Lesson 09: from the elements that the ranks loaded, tell which files they put together, and where they cut.

What a rank takes is a slice of some files that follow each other. Each of a few sets of files, beginnings and
lengths is tried, and what is behind it is 0.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from zerolab.course.lessons.incident_room.loaded.found import ZERO

Files = list[list[int]]
SOURCES: Mapping[str, Callable[[Files, int, int], Files]] = {
    "all files in their order": lambda files, rank, n: files,
    "all files, the last one first": lambda files, rank, n: files[::-1],
    "the files from number rank on": lambda files, rank, n: files[rank:] + files,
    "the file of its own number": lambda files, rank, n: [files[rank % len(files)]],
    "the first file": lambda files, rank, n: files[:1],
    "the last file": lambda files, rank, n: files[-1:],
    "the files rank, rank + N and so on": lambda files, rank, n: files[rank::n],
    "each rank's equal number of files": lambda files, rank, n: files[
        rank * (len(files) // n) : (rank + 1) * (len(files) // n)
    ],
}


class Cut(NamedTuple):
    """How a rank cuts: the files, and the length by which it begins and ends, by their names."""

    source: str
    begin: str
    length: str

    def __str__(self) -> str:
        where = "from the beginning" if self.begin == "0" else f"from element rank * {self.begin} on"
        if self.begin == STRIDE:
            return f"each rank takes every N-th element of {self.source}, from that of its own number on"
        return f"each rank takes {self.length} elements {where}, of {self.source}"


STRIDE = "stride"


def lengths(files: Files, numel: int, n: int, own: int) -> dict[str, int]:
    return {
        "len(self.shard)": own,
        "len(files[0])": len(files[0]),
        "(numel // N)": numel // n,
        "(numel // N + 1)": numel // n + 1,
        "ceil(numel / N)": -(-numel // n),
    }


def followed(loaded: Mapping[int, Sequence[int]], files: Files, n: int) -> Cut | None:
    """The cut that all ranks have made, where it is not the right one."""
    every = sorted(element for file in files for element in file)
    numel = len(set(every))
    if ZERO in every or (len(every) != numel and any(len(set(file)) != numel for file in files)):
        return None  # neither do the files follow each other, nor has each of them all
    for cut in _cuts():
        taken = {rank: _taken(cut, files, numel, rank, n, len(found)) for rank, found in loaded.items()}
        if taken == {rank: list(found) for rank, found in loaded.items()}:
            return cut
    return None


def _cuts() -> Iterator[Cut]:
    names = list(lengths([[]], 0, 1, 0))
    for source, begin in product(SOURCES, ("0", *names, STRIDE)):
        for length in dict.fromkeys(("len(self.shard)", begin if begin in names else "len(self.shard)")):
            yield Cut(source, begin, length)


def _taken(cut: Cut, files: Files, numel: int, rank: int, n: int, own: int) -> list[int]:
    source = [element for file in SOURCES[cut.source](files, rank, n) for element in file]
    sizes = lengths(files, numel, n, own) | {"0": 0}
    if cut.begin == STRIDE:
        taken = source[rank::n]
    else:
        begin = rank * sizes[cut.begin]
        taken = source[begin : begin + sizes[cut.length]]
    return (taken + [ZERO] * own)[:own]
