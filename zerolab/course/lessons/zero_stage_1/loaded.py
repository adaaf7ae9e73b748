"""Lesson 04's exercise on loading: run the reader's function, and note what it reads and where it stops."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from zerolab.course.attempts import Odd, returned, told
from zerolab.course.lessons.zero_stage_1.checkpoints import CASES, Case

Read = tuple[int, int, int]  # the file, start and stop


class Call(NamedTuple):
    """Which shard the function was asked for."""

    case: Case
    rank: int

    def __str__(self) -> str:
        return f"{self.case}, rank {self.rank}"

    @property
    def first(self) -> int:
        """The first element of the state in the shard; behind the state if the shard is padding alone."""
        return self.case.own * self.rank

    @property
    def last(self) -> int:
        """The end of the shard's elements in the state."""
        return max(min(self.first + self.case.own, self.case.numel), self.first)

    def needed(self) -> list[Read]:
        """What has to be read."""
        found, saved = [], self.case.saved
        for file in range(self.case.saved_by):
            start, stop = max(self.first, saved * file), min(self.last, saved * (file + 1))
            found += [(file, start - saved * file, stop - saved * file)] if start < stop else []
        return found


class Error(NamedTuple):
    """The exception that stopped the function, as the reader should read it."""

    kind: str
    text: str
    place: str


class Loaded(NamedTuple):
    """What a call returned, what it read, and what stopped it."""

    value: torch.Tensor | Odd
    reads: list[Read]
    error: Error | None = None

    @property
    def read(self) -> int:
        return sum(stop - start for _, start, stop in self.reads)

    @property
    def opened(self) -> list[int]:
        return sorted({file for file, start, stop in self.reads if start < stop})


def elements(reads: list[Read]) -> list[tuple[int, int]]:
    """Each element that is read, by file and place, however many a read has."""
    return [(file, place) for file, start, stop in reads for place in range(start, stop)]


class Files:
    """The files of a checkpoint, which note what is read of them."""

    def __init__(self, case: Case):
        self.files = case.files()
        self.reads: list[Read] = []

    def read(self, file: int, start: int, stop: int) -> torch.Tensor:
        """Return the elements start to stop of the shard that rank `file` saved."""
        self.reads.append((file, start, stop))
        if not 0 <= file < len(self.files):
            raise IndexError(f"read({file}, {start}, {stop}): the files are 0 to {len(self.files) - 1}")
        length = self.files[file].numel()
        if not 0 <= start <= stop <= length:
            raise IndexError(f"read({file}, {start}, {stop}): a file has the elements 0 to {length}")
        return self.files[file][start:stop].clone()


def load_all(fn: Callable) -> list[Loaded]:
    """In the worker: what every rank of every case loads. One that stops does not stop the others."""
    return [_load(fn, call) for call in CALLS]


def _load(fn: Callable, call: Call) -> Loaded:
    files, (case, rank) = Files(call.case), call
    try:
        value = fn(files.read, case.saved_by, case.numel, case.world_size, rank)
    except Exception as error:
        stopped = told(error)
        return Loaded(Odd("an exception", ""), files.reads, Error(stopped.kind, stopped.text, stopped.place))
    return Loaded(returned(value), files.reads)


CALLS = [Call(case, rank) for case in CASES for rank in range(case.world_size)]
