"""Lesson 04's exercise on checkpoints: load a rank's shard from the files of other ranks."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from zerolab.course.attempts import Odd, attempt, returned
from zerolab.course.evidence import Finding, examine
from zerolab.course.exercise import graded
from zerolab.course.lessons.zero_stage_1.checkpoints import CASES, MISTAKES, Case, zeros_behind
from zerolab.course.lessons.zero_stage_1.solution import load_shard
from zerolab.course.targets import bronze

HINTS = (
    "a shard of the files has ceil(numel / saved_by) elements, and yours has ceil(numel / world_size).",
    "your shard is a range of the flat buffer that ends at numel at most. File f holds another range. Read "
    "where the two overlap, counted from the file's first element.",
    "begin with torch.zeros(own), and for each file copy read(f, start - f * saved, stop - f * saved) into "
    "[start - rank * own : stop - rank * own], where start and stop are the ends of the overlap.",
)


class Loaded(NamedTuple):
    """What a rank returned, and how many elements it read."""

    value: torch.Tensor | Odd
    read: int


class Files:
    """The files of a checkpoint, for one rank: counts what is read of them."""

    def __init__(self, case: Case, rank: int):
        self.case, self.rank, self.files, self.elements = case, rank, case.files(), 0
        self.furthest = 0  # of all reads, the largest stop

    def read(self, file: int, start: int, stop: int) -> torch.Tensor:
        """Return the elements start to stop of the shard that rank `file` saved."""
        if not 0 <= file < len(self.files):
            raise IndexError(f"read({file}, {start}, {stop}): {no_such_file(self)}")
        length = self.files[file].numel()
        if not 0 <= start <= stop <= length:
            why = outside(self.case, self.rank, file, start, stop)
            raise IndexError(f"read({file}, {start}, {stop}): a file has the elements 0 to {length}{why}")
        self.elements += stop - start
        self.furthest = max(self.furthest, stop)
        return self.files[file][start:stop].clone()


def no_such_file(files: Files) -> str:
    """Where the rank's elements are, and whether the files were taken for shorter ones."""
    case, there = files.case, f"the files are 0 to {len(files.files) - 1}"
    if 0 < files.furthest <= case.numel // case.saved_by < case.saved:
        return (
            f"{there}, each has {case.saved} elements, and you read no more than {files.furthest} of any. "
            "numel // saved_by rounds down: a file has ceil(numel / saved_by)"
        )
    first, last = case.own * files.rank, min(case.own * (files.rank + 1), case.numel) - 1
    if last < first:
        return f"{there}, and rank {files.rank}'s shard is padding alone: nothing is to be read"
    where = " and ".join(str(each) for each in sorted({first // case.saved, last // case.saved}))
    return f"{there}, and the elements of rank {files.rank}'s shard begin and end in file {where}"


def outside(case: Case, rank: int, file: int, start: int, stop: int) -> str:
    """Why a rank asks for elements that a file does not have, compared with those that it needs of it."""
    begins = case.saved * file
    first, last = case.own * rank, min(case.own * (rank + 1), case.numel)
    right = max(first - begins, 0), min(last - begins, case.saved)
    if right[0] >= right[1]:
        return f", and rank {rank} needs nothing of file {file}"
    moved = lambda by: (right[0] + by, right[1] + by)
    if (start, stop) == moved(begins):
        return (
            f". {start} to {stop} is where they stand in the whole state: subtract {begins}, where file "
            f"{file} begins"
        )
    if (start, stop) == moved(begins - first):
        return f". {start} to {stop} is where they belong in your shard: count from the file's first element"
    if (max(start, 0), min(stop, case.saved)) == right:
        return ": cut both ends off there"
    if (start, stop) == (right[0], right[1] - right[0]):
        return f". {stop} is how many you need: pass stop, and not the length"
    return f", and rank {rank} needs {right[0]} to {right[1]} of file {file}"


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
    files = Files(case, rank)
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
        lambda rank: [{"the right shard": right[rank]}],
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
