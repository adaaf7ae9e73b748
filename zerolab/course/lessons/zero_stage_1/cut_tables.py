"""Lesson 04's exercise on loading: the cuts of a state into files and into new shards, and wrong ones."""

from collections.abc import Callable, Mapping, Sequence
from math import lcm

from zerolab import ring
from zerolab.course.lessons.zero_stage_1.checkpoints import Case

Cut = Callable[[Case], Sequence[slice]]
"""From a case: the range of each file or shard in the state."""
Length = Callable[[Case], int]


def up(numel: int, parts: int) -> int:
    """Return numel / parts, rounded up."""
    return -(-numel // parts)


def _files(length: Length) -> Cut:
    """The cut into files of one length, as many as hold the state and as many as there are."""

    def cut(case: Case) -> list[slice]:
        size = max(length(case), 1)
        count = max(up(case.numel, size), case.saved_by)
        return [slice(size * n, size * (n + 1)) for n in range(count)]

    return cut


def _shards(length: Length, end: Length = lambda c: c.numel, first: int = 0, last: int = 0) -> Cut:
    """The cut into shards of one length up to `end`; `first` and `last` move the ends of each."""

    def cut(case: Case) -> list[slice]:
        ranges = [(length(case) * rank, length(case) * (rank + 1)) for rank in range(case.world_size)]
        return [
            slice(min(max(begin + first, 0), end(case)), min(stop + last, end(case)))
            for begin, stop in ranges
        ]

    return cut


def _rest_last(numel: int, parts: int) -> list[slice]:
    """Parts of numel // parts elements, of which the last is longer by the rest."""
    size = numel // parts
    return [slice(size * n, size * (n + 1) if n < parts - 1 else numel) for n in range(parts)]


def _old(case: Case) -> int:
    """The elements of all files, with their padding."""
    return case.saved * case.saved_by


def own(case: Case) -> int:
    """The elements of a new shard."""
    return case.own


FLOOR, ONE_MORE, CHUNKS = "down", "one more", "chunks"  # cuts that files and shards may have together
# fmt: off
FILES: Mapping[str, tuple[str, Cut]] = {
    "": ("", _files(lambda c: c.saved)),
    "you take a file for numel // saved_by elements, which rounds down: it has ceil(numel / saved_by)":
        (FLOOR, _files(lambda c: c.numel // c.saved_by)),
    "you take a file for numel // saved_by elements, and the last file for all the rest: each file has "
    "ceil(numel / saved_by)":
        ("", lambda c: _rest_last(c.numel, c.saved_by)),
    "you take the files for those that ring.chunks cuts. They are all equal, ceil(numel / saved_by) elements "
    "long, and the padding is at the end of the last":
        (CHUNKS, lambda c: ring.chunks(c.numel, c.saved_by)),
    "you take a file for numel // saved_by + 1 elements, one too many where saved_by divides numel":
        (ONE_MORE, _files(lambda c: c.numel // c.saved_by + 1)),
    "you take a file for ceil(numel / world_size) elements, which is the length of a new shard: it has "
    "ceil(numel / saved_by)":
        ("", _files(own)),
    "you take a file for round(numel / saved_by) elements, which may round down: it has ceil(numel / "
    "saved_by)":
        ("", _files(lambda c: round(c.numel / c.saved_by))),
}
SHARDS: Mapping[str, tuple[str, Cut]] = {
    "": ("", _shards(own)),
    "you cut the new shards with ring.chunks. They are all equal, ceil(numel / world_size) elements, and the "
    "padding is at the end of the last":
        (CHUNKS, lambda c: ring.chunks(c.numel, c.world_size)),
    "the length numel // world_size rounds down, so your shards are too short: ceil(numel / world_size)":
        (FLOOR, _shards(lambda c: c.numel // c.world_size)),
    "a new shard has numel // world_size + 1 elements here, one too many where world_size divides numel":
        (ONE_MORE, _shards(lambda c: c.numel // c.world_size + 1)),
    "the last rank takes the remainder, so its shard is longer: all shards have ceil(numel / world_size) "
    "elements":
        ("", lambda c: _rest_last(c.numel, c.world_size)),
    "the new cuts are at numel * rank // world_size: a shard begins at rank * ceil(numel / world_size)":
        ("", lambda c: [slice(c.numel * rank // c.world_size, c.numel * (rank + 1) // c.world_size)
                        for rank in range(c.world_size)]),
    "your shards have round(numel / world_size) elements, which may round down: ceil(numel / world_size)":
        ("", _shards(lambda c: round(c.numel / c.world_size))),
    "your shards begin at rank times the length of an old file: a new shard has ceil(numel / world_size) "
    "elements":
        ("", _shards(lambda c: c.saved)),
    "your shards are so long that world_size of them hold all files with their padding: drop the padding "
    "first, and cut numel elements":
        ("", _shards(lambda c: up(_old(c), c.world_size))),
    "the old padding is cut up like values: drop it first, the state has numel elements":
        ("", _shards(lambda c: up(_old(c), c.world_size), _old)),
    "the state is padded to a multiple of both saved_by and world_size: a new shard has ceil(numel / "
    "world_size) elements":
        ("", _shards(lambda c: up(c.numel, both := lcm(c.saved_by, c.world_size)) * both // c.world_size)),
    "your shards go on into the old padding: stop at numel":
        ("", _shards(own, _old)),
    "you drop numel % saved_by elements as the old padding: it has saved_by * ceil(numel / saved_by) - numel":
        ("", _shards(own, lambda c: _old(c) - c.numel % c.saved_by)),
    "you take all padding to be in the last file, and it can fill several files: stop at numel":
        ("", _shards(own, lambda c: c.saved * (c.saved_by - 1) + max(c.saved - (_old(c) - c.numel), 0))),
    "the last element of the state is never read: you stop at numel - 1":
        ("", _shards(own, lambda c: c.numel - 1)),
    "each new shard begins one element too late: it begins at rank * ceil(numel / world_size)":
        ("", _shards(own, first=1)),
    "each new shard begins and ends one element too late: it begins at rank * ceil(numel / world_size)":
        ("", _shards(own, first=1, last=1)),
    "each new shard ends one element too early: it ends where the next one begins":
        ("", _shards(own, last=-1)),
    "each new shard ends one element too early, the last one too: it ends where the next one begins":
        ("", lambda c: [slice(cut.start, max(cut.stop - 1, cut.start)) for cut in _shards(own)(c)]),
    "you read one element too many at the end of each shard: stop is the first element that is not read":
        ("", _shards(own, last=1)),
    "you read one element too many at the end of each shard, also of the old padding: stop is the first "
    "element that is not read":
        ("", _shards(own, _old, last=1)),
    "these are the next rank's elements":
        ("", lambda c: [*_shards(own)(c)[1:], _shards(own)(c)[0]]),
    "these are the next rank's elements, and the last rank has none: ranks begin with 0":
        ("", lambda c: [*_shards(own)(c)[1:], slice(0, 0)]),
    "these are the previous rank's elements: ranks begin with 0":
        ("", lambda c: [slice(0, 0), *_shards(own)(c)[:-1]]),
    "these are the previous rank's elements, and rank 0 has its own: ranks begin with 0":
        ("", lambda c: [_shards(own)(c)[0], *_shards(own)(c)[:-1]]),
    "the ranks are in reverse order: rank 0 has the first shard":
        ("", lambda c: _shards(own)(c)[::-1]),
    "every rank has the first shard: use rank":
        ("", lambda c: [_shards(own)(c)[0]] * c.world_size),
}
BOTH = {
    CHUNKS: "files and shards are cut with ring.chunks. All files are equal, and so are all shards: round "
    "up, and the padding is at the end",
    FLOOR: "numel // saved_by and numel // world_size round down: round up, for the files and for the shards",
    ONE_MORE: "the length numel // N + 1 is one too many where N divides numel, in files and in shards: "
    "-(-numel // N) rounds up",
}
# fmt: on
