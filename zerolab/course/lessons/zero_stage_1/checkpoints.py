"""Lesson 04's exercise on loading: checkpoints of other numbers of ranks, and what mistakes make of them."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from zerolab import ring


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
    Case(15, 4, 5),
    Case(15, 3, 2),
    Case(5, 4, 3),  # the padding fills the last file, and a part of the one before
)


def zeros_behind(values: torch.Tensor, cut: slice) -> torch.Tensor:
    """A range of the values, with zeros where the range goes beyond them."""
    part = values[cut]
    return torch.cat([part, part.new_zeros(cut.stop - cut.start - part.numel())])


def _even(numel: int, world_size: int, rank: int) -> slice:
    size = -(-numel // world_size)
    return slice(size * rank, size * (rank + 1))


def _one_file(case: Case, rank: int, last: bool = False) -> torch.Tensor:
    """The shard's elements out of the file that has the first of them, or the last; zeros for the rest."""
    cut = case.shard(rank)
    file = (min(cut.stop, case.numel) - 1 if last else cut.start) // case.saved
    state = case.state()
    state[: case.saved * file] = 0
    state[case.saved * (file + 1) :] = 0
    return zeros_behind(state, cut)


def _one_on_the_other(case: Case, rank: int) -> torch.Tensor:
    """The parts of all files, each put at the beginning of the shard."""
    cut, shard = case.shard(rank), torch.zeros(case.own)
    for file in range(case.saved_by):
        own = case.state()[max(cut.start, case.saved * file) : min(cut.stop, case.saved * (file + 1))]
        shard[: len(own)] = own
    return shard


def _few_files(case: Case, rank: int) -> torch.Tensor:
    """The shard's elements out of the first world_size files, and zeros for the rest."""
    return zeros_behind(case.state()[: case.saved * case.world_size], case.shard(rank))


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
    "the length numel // world_size rounds down, so the last elements are lost: round up":
        _floor,
    "each rank returns the file with its own number, which is the shard of another number of ranks":
        lambda c, r: c.files()[r % len(c.files())],
    "each rank returns the file with its own number without padding, which is the shard of another number "
    "of ranks":
        lambda c, r: c.state()[c.saved * r:c.saved * (r + 1)],
    "the shards begin at rank times the length of an old file, and have that length: the new length is "
    "ceil(numel / world_size)":
        lambda c, r: zeros_behind(c.state(), slice(c.saved * r, c.saved * (r + 1))),
    "each piece is put at the beginning of the shard, over the one before: pieces follow each other":
        _one_on_the_other,
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
    "a shard can overlap several files, and only the last one's part is left: make the shard once, before "
    "the loop":
        lambda c, r: _one_file(c, r, last=True),
    "only the first world_size files were read: there are saved_by of them":
        _few_files,
    "the shard has the length of a file: it has ceil(numel / world_size) elements":
        lambda c, r: zeros_behind(c.state(), slice(c.own * r, c.own * r + c.saved)),
    "the shard was made and never filled, or made anew for each file":
        lambda c, r: torch.zeros(c.own),
}
# fmt: on
