"""Lesson 04's exercise on checkpoints: load a rank's shard from the files of other ranks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from zerolab.course.attempts import Odd, attempt, returned
from zerolab.course.evidence import Finding, examine
from zerolab.course.exercise import graded
from zerolab.course.lessons.zero_stage_1.checkpoints import CASES, MISTAKES, Case, zeros_behind
from zerolab.course.lessons.zero_stage_1.other_cuts import Read, begun, explaining
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
    """What a rank returned, and what it read: how many elements, and of which files."""

    value: torch.Tensor | Odd
    reads: list[Read]

    @property
    def read(self) -> int:
        return sum(stop - start for _, start, stop in self.reads)

    @property
    def opened(self) -> list[int]:
        return sorted({file for file, start, stop in self.reads if start < stop})


class Files:
    """The files of a checkpoint, for one rank: notes what is read of them."""

    def __init__(self, case: Case, rank: int):
        self.case, self.rank, self.files = case, rank, case.files()
        self.reads: list[Read] = []

    def read(self, file: int, start: int, stop: int) -> torch.Tensor:
        """Return the elements start to stop of the shard that rank `file` saved."""
        why = begun(self.case, self.rank, [*self.reads, (file, start, stop)])
        if not 0 <= file < len(self.files):
            raise IndexError(f"read({file}, {start}, {stop}): {why or no_such_file(self)}")
        length = self.files[file].numel()
        if not 0 <= start <= stop <= length:
            why = f". {why[0].upper()}{why[1:]}" if why else of_short_files(self, (file, start, stop))
            why = why or outside(self.case, self.rank, file, start, stop)
            raise IndexError(f"read({file}, {start}, {stop}): a file has the elements 0 to {length}{why}")
        self.reads.append((file, start, stop))
        return self.files[file][start:stop].clone()


def no_such_file(files: Files) -> str:
    """Where the rank's elements are, and whether the files were taken for shorter ones."""
    case, there = files.case, f"the files are 0 to {len(files.files) - 1}"
    furthest = max((stop for _, _, stop in files.reads), default=0)
    if 0 < furthest <= case.numel // case.saved_by < case.saved:
        return (
            f"{there}, each has {case.saved} elements, and you read no more than {furthest} of any. "
            "numel // saved_by rounds down: a file has ceil(numel / saved_by)"
        )
    first, last = case.own * files.rank, min(case.own * (files.rank + 1), case.numel) - 1
    if last < first:
        return f"{there}, and rank {files.rank}'s shard is padding alone: nothing is to be read"
    where = " and ".join(str(each) for each in sorted({first // case.saved, last // case.saved}))
    return f"{there}, and the elements of rank {files.rank}'s shard begin and end in file {where}"


def of_short_files(files: Files, asked: Read) -> str | None:
    """Whether all reads of a rank are right if a file has numel // saved_by elements, which rounds down."""
    case, short = files.case, files.case.numel // files.case.saved_by
    if not 0 < short < case.saved:
        return None
    reads = [*files.reads, asked]
    places = lambda size: [size * file + at for file, start, stop in reads for at in range(start, stop)]
    begins, found = case.own * files.rank, places(short)
    right_files = all(file == min(file + start // short, case.saved_by - 1) for file, start, _ in reads)
    if not right_files or found == places(case.saved) or found != [*range(begins, begins + len(found))]:
        return None
    return (
        f". With files of numel // saved_by elements, {short}, your reads are those of elements {found[0]} "
        f"to {found[-1] + 1} of the state, as rank {files.rank} needs them. That rounds down: a file has "
        f"ceil(numel / saved_by) elements, {case.saved}"
    )


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
    reads = {(case, rank): own.reads for case, loaded in by_case.items() for rank, own in enumerate(loaded)}
    return examine(CASES, lambda case: _compared(case, by_case[case], explaining(reads)))


def _load_all(fn: Callable) -> list[list[Loaded]]:
    """In the worker: what every rank of every case loads."""
    return [[_load(fn, case, rank) for rank in range(case.world_size)] for case in CASES]


def _load(fn: Callable, case: Case, rank: int) -> Loaded:
    files = Files(case, rank)
    value = fn(files.read, case.saved_by, case.numel, case.world_size, rank)
    return Loaded(returned(value), files.reads)


def _compared(case: Case, loaded: list[Loaded], why: str | None) -> Finding:
    """Compare what the ranks of a case loaded. `why`: what their reads tell of all cases."""
    ranks = range(case.world_size)
    right = [zeros_behind(case.state(), case.shard(rank)) for rank in ranks]
    mistakes = {each: [value(case, rank) for rank in ranks] for each, value in MISTAKES.items()}
    seen: list[Any] = [own.value for own in loaded]
    return Finding(
        str(case),
        None,
        seen,
        right,
        {why: seen} if why else mistakes,
        lambda rank: [{"the right shard": right[rank]}],
        whole=torch.cat(right),
        cost=_read_too_much(case, loaded),
        cause=_misplaced(case, loaded, right),
    )


def _misplaced(case: Case, loaded: list[Loaded], right: list[torch.Tensor]) -> str | None:
    """Where the first wrong element comes from; all numbers of a state differ."""
    for rank, (own, want) in enumerate(zip(loaded, right, strict=True)):
        got = own.value
        if isinstance(got, Odd) or got.dtype != want.dtype or got.shape != want.shape or got.equal(want):
            continue
        element = int((got != want).nonzero()[0])
        rank_begins = rank * case.own
        at = (case.joined() == got[element]).nonzero().flatten()
        if rank_begins + element >= case.numel:
            return f"element {element} of its shard is padding, which has to be 0, and is {got[element]:.4g}"
        if not got[element]:
            why = _not_opened(case, rank, own, element)
            return f"element {element} of its shard is 0, and was never filled{why}"
        if not at.numel():
            return None
        file, place = divmod(int(at[0]), case.saved)
        return (
            f"element {element} of its shard is element {place} of file {file}, and element "
            f"{rank_begins + element} of the state belongs there, which is in file "
            f"{(rank_begins + element) // case.saved} at {(rank_begins + element) % case.saved}"
        )
    return None


def _not_opened(case: Case, rank: int, own: Loaded, element: int) -> str:
    """Whether the file that has an element was never read, and which were."""
    first, last = case.own * rank, min(case.own * (rank + 1), case.numel) - 1
    file, needed = (first + element) // case.saved, range(first // case.saved, last // case.saved + 1)
    if file in own.opened or not own.opened:
        return ""
    return (
        f". It is in file {file}. The shard overlaps {_files(needed)}, and {_files(own.opened)} alone "
        f"{'was' if len(own.opened) == 1 else 'were'} read: go on until the shard is full"
    )


def _files(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"files {', '.join(first)} and {last}" if first else f"file {last}"


def _read_too_much(case: Case, loaded: list[Loaded]) -> str | None:
    for rank, own in enumerate(loaded):
        if own.read > case.own:
            all_of_it = ", all there are" if own.read >= case.numel else ""
            return bronze(
                f"rank {rank} reads {own.read} elements{all_of_it}, and its shard has {case.own}: read a "
                "file only where your shard overlaps it"
            )
    return None
