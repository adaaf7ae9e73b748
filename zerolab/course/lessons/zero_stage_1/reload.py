"""Lesson 04's exercise on checkpoints: a rank's shard of what another number of ranks has saved."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from zerolab import ring
from zerolab.course.attempts import Odd, attempt, returned
from zerolab.course.evidence import Finding, examine
from zerolab.course.exercise import graded
from zerolab.course.lessons.zero_stage_1.solution import load_shard
from zerolab.course.targets import bronze

HINTS = (
    "a shard of the files has ceil(numel / saved_by) elements, and yours has ceil(numel / world_size).",
    "your shard is a range of the flat buffer that ends at numel at most. File f holds another range. Read "
    "where the two overlap, counted from the file's first element.",
    "begin with torch.zeros(own), and for each file copy read(f, start - f * saved, stop - f * saved) into "
    "[start - rank * own : stop - rank * own], where start and stop are the ends of the overlap.",
)


class Case(NamedTuple):
    """The length of the state without padding, the ranks that saved it, and the ranks that load it."""

    numel: int
    saved_by: int
    world_size: int

    @property
    def saved(self) -> int:
        """The elements in each file."""
        return -(-self.numel // self.saved_by)

    @property
    def own(self) -> int:
        """The elements of each new shard."""
        return -(-self.numel // self.world_size)

    def state(self) -> torch.Tensor:
        """The state without padding: Adam's v, say."""
        return torch.rand(self.numel, generator=torch.Generator().manual_seed(self.numel)) + 1

    def joined(self) -> torch.Tensor:
        """All files end to end. What stands in the padding is of no use, and not zero."""
        padding = torch.arange(self.saved * self.saved_by - self.numel) - 77.0
        return torch.cat([self.state(), padding])

    def files(self) -> list[torch.Tensor]:
        return list(self.joined().split(self.saved)) if self.numel else []

    def shard(self, rank: int) -> slice:
        """A rank's range of the new padded buffer; the rank is counted around."""
        rank %= self.world_size
        return slice(self.own * rank, self.own * (rank + 1))

    def __str__(self) -> str:
        return f"{self.numel} elements, saved by {self.saved_by} and loaded by {self.world_size}"


CASES = (
    Case(10, 4, 3),
    Case(9, 4, 2),
    Case(1001, 4, 6),
    Case(1001, 6, 4),
    Case(64, 4, 4),
    Case(11, 3, 5),
    Case(5, 2, 8),
    Case(12, 1, 4),
)


def zeros_behind(values: torch.Tensor, cut: slice) -> torch.Tensor:
    """A range of the values, with zeros where the range goes beyond them."""
    part = values[cut]
    return torch.cat([part, part.new_zeros(cut.stop - cut.start - part.numel())])


def _even(numel: int, world_size: int, rank: int) -> slice:
    size = -(-numel // world_size)
    return slice(size * rank, size * (rank + 1))


def _one_file(case: Case, rank: int) -> torch.Tensor:
    """The shard's elements out of the file that has the first of them, and zeros for the rest."""
    cut = case.shard(rank)
    file = cut.start // case.saved
    return zeros_behind(case.joined()[: min(case.numel, case.saved * (file + 1))], cut)


def _floor(case: Case, rank: int) -> torch.Tensor:
    size = case.numel // case.world_size
    return case.state()[size * rank : size * (rank + 1)]


# A sentence, and what rank r returns in a case.
# fmt: off
MISTAKES: dict[str, Callable[[Case, int], torch.Tensor]] = {
    "the old padding is not dropped: the files' padding was cut up like values, so the shards are too long. "
    "The state has numel elements":
        lambda c, r: zeros_behind(c.joined(), _even(c.saved * c.saved_by, c.world_size, r)),
    "the old padding is still there, where the new padding belongs: stop at numel, and fill up with zeros":
        lambda c, r: zeros_behind(c.joined(), c.shard(r)),
    "the new padding stands before the values: it belongs behind them":
        lambda c, r: torch.cat([torch.zeros(c.own - len(own := c.state()[c.shard(r)])), own]),
    "the last shards are shorter, because the new padding is missing: every rank's shard has ceil(numel / "
    "world_size) elements":
        lambda c, r: c.state()[c.shard(r)],
    "the first shards are one longer than the rest, as ring.chunks cuts: all shards are equal, with padding "
    "at the end":
        lambda c, r: c.state()[ring.chunks(c.numel, c.world_size)[r]],
    "numel // world_size rounds down, so the last elements are lost: round up":
        _floor,
    "each rank returns the file with its own number, which is the shard of another number of ranks":
        lambda c, r: c.files()[r % len(c.files())],
    "each rank returns the file with its own number without padding, which is the shard of another number "
    "of ranks":
        lambda c, r: c.state()[c.saved * r:c.saved * (r + 1)],
    "each rank returns the whole state: cut your shard out of it":
        lambda c, r: c.state(),
    "each rank returns all files end to end: cut your shard out of them, without their padding":
        lambda c, r: c.joined(),
    "these are the next rank's elements":
        lambda c, r: zeros_behind(c.state(), c.shard(r + 1)),
    "these are the previous rank's elements: ranks begin with 0":
        lambda c, r: zeros_behind(c.state(), c.shard(r - 1)),
    "every rank has the first shard: use rank":
        lambda c, r: zeros_behind(c.state(), c.shard(0)),
    "the files are in reverse order":
        lambda c, r: zeros_behind(torch.cat(c.files()[::-1]), c.shard(r)),
    "a shard can overlap several files, and this takes the first one's part only":
        _one_file,
    "the shard has the length of a file: it has ceil(numel / world_size) elements":
        lambda c, r: zeros_behind(c.state(), slice(c.own * r, c.own * r + c.saved)),
    "the shard was made and never filled":
        lambda c, r: torch.zeros(c.own),
}
# fmt: on


class Loaded(NamedTuple):
    """What a rank returned, and how many elements it read."""

    value: torch.Tensor | Odd
    read: int


class Files:
    """The files of a checkpoint: counts what is read of them."""

    def __init__(self, case: Case):
        self.files, self.elements = case.files(), 0

    def read(self, file: int, start: int, stop: int) -> torch.Tensor:
        """The elements start to stop of the shard that rank `file` saved."""
        if not 0 <= file < len(self.files):
            raise IndexError(f"read({file}, {start}, {stop}): the files are 0 to {len(self.files) - 1}")
        length = self.files[file].numel()
        if not 0 <= start <= stop <= length:
            raise IndexError(f"read({file}, {start}, {stop}): a file has the elements 0 to {length}")
        self.elements += stop - start
        return self.files[file][start:stop].clone()


@graded(
    "Silver: any number of ranks loads what any other has saved, without the old padding, and no rank reads "
    "more than its shard.",
    call="load_shard(read, saved_by, numel, world_size, rank)",
    hints=HINTS,
    solution=[load_shard],
)
def check_load(fn: Callable) -> str | None:
    """Let fn(read, saved_by, numel, world_size, rank) load every rank's shard of eight checkpoints.

    Bronze for right values, silver if a rank reads no more elements than its shard has.
    """
    outcome = attempt(_load_all, [(fn,)])
    if outcome.failure:
        return outcome.failure.replace("rank 0", "your function", 1).replace(", not waiting", "")
    by_case = dict(zip(CASES, outcome.values[0], strict=True))
    values = [own.value for loaded in by_case.values() for own in loaded]
    if all(isinstance(value, Odd) and value.kind == "NoneType" for value in values):
        return "not written yet: the function returned None"
    return examine(CASES, lambda case: _compared(case, by_case[case]))


def _load_all(fn: Callable) -> list[list[Loaded]]:
    """In the worker: what every rank of every case loads."""
    return [[_load(fn, case, rank) for rank in range(case.world_size)] for case in CASES]


def _load(fn: Callable, case: Case, rank: int) -> Loaded:
    files = Files(case)
    value = fn(files.read, case.saved_by, case.numel, case.world_size, rank)
    return Loaded(returned(value), files.elements)


def _compared(case: Case, loaded: list[Loaded]) -> Finding:
    ranks = range(case.world_size)
    right = [zeros_behind(case.state(), case.shard(rank)) for rank in ranks]
    return Finding(
        str(case),
        None,
        [own.value for own in loaded],
        right,
        {why: [value(case, rank) for rank in ranks] for why, value in MISTAKES.items()},
        whole=torch.cat(right),
        cost=_read_too_much(case, loaded),
        cause=_misplaced(case, [own.value for own in loaded], right),
    )


def _misplaced(case: Case, seen: list[torch.Tensor | Odd], right: list[torch.Tensor]) -> str | None:
    """Where the first wrong element comes from; all numbers of a state differ."""
    for got, want in zip(seen, right, strict=True):
        if isinstance(got, Odd) or got.dtype != want.dtype or got.shape != want.shape or got.equal(want):
            continue
        element = int((got != want).nonzero()[0])
        rank_begins = next(rank for rank, each in enumerate(right) if each is want) * case.own
        at = (case.joined() == got[element]).nonzero().flatten()
        if rank_begins + element >= case.numel:
            return f"element {element} of its shard is padding, which has to be 0, and is {got[element]:.4g}"
        if not got[element]:
            return f"element {element} of its shard is 0, and was never filled"
        if not at.numel():
            return None
        file, place = divmod(int(at[0]), case.saved)
        return (
            f"element {element} of its shard is element {place} of file {file}, and element "
            f"{rank_begins + element} of the state belongs there, which is in file "
            f"{(rank_begins + element) // case.saved} at {(rank_begins + element) % case.saved}"
        )
    return None


def _read_too_much(case: Case, loaded: list[Loaded]) -> str | None:
    for rank, own in enumerate(loaded):
        if own.read > case.own:
            all_of_it = ", all there are" if own.read >= case.numel else ""
            return bronze(
                f"rank {rank} reads {own.read} elements{all_of_it}, and its shard has {case.own}: read a "
                "file only where your shard overlaps it"
            )
    return None
