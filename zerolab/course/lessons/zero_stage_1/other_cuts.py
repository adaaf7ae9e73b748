"""Lesson 04's exercise on loading: from what was read, tell how the files and the new shards were cut."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from zerolab import ring
from zerolab.course.lessons.zero_stage_1.checkpoints import Case

Read = tuple[int, int, int]  # the file, start and stop
Cut = Callable[[int, int], Sequence[slice]]
"""From the number of elements and of ranks: each rank's range."""


def equal(length: Callable[[int, int], int]) -> Cut:
    """Return the cut into shards of this length, the last of which may be shorter."""

    def cut(numel: int, ranks: int) -> list[slice]:
        size = length(numel, ranks)
        return [slice(min(size * rank, numel), min(size * (rank + 1), numel)) for rank in range(ranks)]

    return cut


ROUNDED_UP = equal(lambda numel, ranks: -(-numel // ranks))
ROUNDED_DOWN = equal(lambda numel, ranks: numel // ranks)
ONE_MORE = equal(lambda numel, ranks: numel // ranks + 1)


class Hypothesis(NamedTuple):
    """How the files were taken to be cut, and how the new shards were cut.

    Attributes:
        of_files, of_shards: the cuts.
        swapped: whether saved_by and world_size stand for each other.
        change: what is made of the right reads of a rank.
    """

    of_files: Cut = ROUNDED_UP
    of_shards: Cut = ROUNDED_UP
    swapped: bool = False
    change: Callable[[Case, list[Read]], list[Read]] = lambda case, reads: reads

    def reads(self, case: Case, rank: int) -> list[Read]:
        """What the rank would read."""
        saved_by, world_size = (
            (case.world_size, case.saved_by) if self.swapped else (case.saved_by, case.world_size)
        )
        shards = self.of_shards(case.numel, world_size)
        own = shards[rank] if rank < len(shards) else slice(case.numel, case.numel)
        found = []
        for file, there in enumerate(self.of_files(case.numel, saved_by)):
            start, stop = max(own.start, there.start), min(own.stop, there.stop)
            found += [(file, start - there.start, stop - there.start)] if start < stop else []
        return self.change(case, found)


# fmt: off
HYPOTHESES: Mapping[str, Hypothesis] = {
    "you take a file for numel // saved_by elements, which rounds down: it has ceil(numel / saved_by)":
        Hypothesis(of_files=ROUNDED_DOWN),
    "you take the files for those that ring.chunks cuts. They are all equal, ceil(numel / saved_by) elements "
    "long, and the padding is at the end of the last":
        Hypothesis(of_files=ring.chunks),
    "you take a file for numel // saved_by + 1 elements, one too many where saved_by divides numel":
        Hypothesis(of_files=ONE_MORE),
    "you cut the new shards with ring.chunks. They are all equal, ceil(numel / world_size) elements, and the "
    "padding is at the end of the last":
        Hypothesis(of_shards=ring.chunks),
    "numel // world_size rounds down, so your shards are too short: ceil(numel / world_size)":
        Hypothesis(of_shards=ROUNDED_DOWN),
    "a new shard has numel // world_size + 1 elements here, one too many where world_size divides numel":
        Hypothesis(of_shards=ONE_MORE),
    "files and shards are cut with ring.chunks. All files are equal, and so are all shards: round up, and "
    "the padding is at the end":
        Hypothesis(of_files=ring.chunks, of_shards=ring.chunks),
    "numel // saved_by and numel // world_size round down: round up, for the files and for the shards":
        Hypothesis(of_files=ROUNDED_DOWN, of_shards=ROUNDED_DOWN),
    "numel // N + 1 is one too many where N divides numel, in files and in shards: -(-numel // N) rounds up":
        Hypothesis(of_files=ONE_MORE, of_shards=ONE_MORE),
    "saved_by and world_size are exchanged: saved_by is the number of files":
        Hypothesis(swapped=True),
    "the last file is never read: there are saved_by of them":
        Hypothesis(change=lambda case, reads: [each for each in reads if each[0] < case.saved_by - 1]),
    "the first file is never read: it has number 0":
        Hypothesis(change=lambda case, reads: [each for each in reads if each[0] > 0]),
    "you read one element too few of each file: stop is the first element that is not read, as in Python":
        Hypothesis(change=lambda case, reads: [(file, start, stop - 1) for file, start, stop in reads]),
    "you leave out the first element of what you need of each file":
        Hypothesis(change=lambda case, reads: [(file, start + 1, stop) for file, start, stop in reads]),
}
# fmt: on


def begun(case: Case, rank: int, reads: Sequence[Read]) -> str | None:
    """The hypothesis of which these are a rank's first reads, where they are none of the right ones."""
    if _is(Hypothesis(), case, rank, reads, to_the_end=False):
        return None
    fits = [why for why, each in HYPOTHESES.items() if _is(each, case, rank, reads, to_the_end=False)]
    return fits[0] if fits else None


def explaining(reads: Mapping[tuple[Case, int], Sequence[Read]]) -> str | None:
    """The hypothesis that explains what all ranks have read in all cases, by case and rank."""
    of = lambda each: all(_is(each, case, rank, own) for (case, rank), own in reads.items())
    fits = [why for why, each in HYPOTHESES.items() if of(each)]
    return fits[0] if fits and not of(Hypothesis()) else None


def _is(
    hypothesis: Hypothesis, case: Case, rank: int, reads: Iterable[Read], to_the_end: bool = True
) -> bool:
    some = [each for each in reads if each[1] != each[2]]
    expected = [each for each in hypothesis.reads(case, rank) if each[1] < each[2]]
    return some == (expected if to_the_end else expected[: len(some)]) and bool(some or to_the_end)
