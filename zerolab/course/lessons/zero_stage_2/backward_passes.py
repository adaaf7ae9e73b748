"""Lesson 05's exercise on order: backward passes, and the results of common mistakes."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from zerolab import ring
from zerolab.course.evidence import sum_of


class Case(NamedTuple):
    """The sizes of the units, and by rank the order in which they get ready; some never do."""

    sizes: dict[str, int]
    orders: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return len(self.orders)

    def gradient(self, rank: int, name: str) -> torch.Tensor:
        """Return a rank's gradient of a unit: zeros if it has none."""
        if name not in self.orders[rank]:
            return torch.zeros(self.sizes[name])
        generator = torch.Generator().manual_seed(100 * rank + ord(name))
        return torch.randn(self.sizes[name], generator=generator)

    def total(self, name: str) -> torch.Tensor:
        return sum_of(self.gradient(rank, name) for rank in range(self.world_size))

    def cut(self, name: str, rank: int) -> slice:
        """Return a rank's chunk of a unit, the rank counted around."""
        return ring.chunks(self.sizes[name], self.world_size)[rank % self.world_size]

    def waiting(self, rank: int) -> list[int]:
        """After each unit that gets ready: how many are ready and cannot be reduced yet."""
        counts = []
        for ready in range(1, len(self.orders[rank]) + 1):
            seen = self.orders[rank][:ready]
            turn = next((at for at, name in enumerate(self.sizes) if name not in seen), len(self.sizes))
            counts.append(sum(list(self.sizes).index(name) >= turn for name in seen))
        return counts

    def __str__(self) -> str:
        return f"{self.world_size} ranks, units ready in the orders {', '.join(self.orders)}"


def _equal(names: str) -> dict[str, int]:
    return dict.fromkeys(names, 48)


CASES = (
    Case(_equal("abcd"), ("abcd", "badc", "dcab")),
    Case({"a": 30, "b": 48, "c": 33}, ("cab", "abc")),
    Case(_equal("abc"), ("acb", "b", "ca")),
    Case(_equal("abcd"), ("ca", "dac", "ac", "adc")),
    Case(_equal("cab"), ("cab", "acb", "bca")),  # the order of sizes is not the alphabet's
    Case({"a": 9, "b": 10}, ("ab", "ba", "ab", "ba")),
    Case({"a": 11, "b": 12}, ("ba", "ab", "ba")),
    Case({"a": 1001, "b": 1001}, ("ab", "ba", "ba", "ab")),
)
Mistake = Callable[[Case, str, int], torch.Tensor]


def _nth(case: Case, name: str, rank: int) -> torch.Tensor:
    """Where each rank reduces in its own order, and all sizes are equal: the n-th units are summed."""
    if any(len(order) < len(case.sizes) for order in case.orders) or len(set(case.sizes.values())) > 1:
        return torch.empty(0)
    place = case.orders[rank].index(name)
    return sum_of(case.gradient(peer, order[place]) for peer, order in enumerate(case.orders))[
        case.cut(name, rank)
    ]


def _misnamed(case: Case, name: str, rank: int) -> torch.Tensor:
    """Where the sum that is made at a moment is kept under the name of the unit that got ready then."""
    place = case.orders[rank].find(name)
    reduced = list(case.sizes)[place]
    return case.total(reduced)[case.cut(reduced, rank)] if place >= 0 else torch.empty(0)


# A sentence, and the shard of a unit that rank r ends with.
# fmt: off
MISTAKES: dict[str, Mistake] = {
    "the ranks reduce different units at the same time, each in the order in which its own get ready. The "
    "buffers have one size, so the sums are made without an error. Reduce in the order of sizes":
        _nth,
    "the sums are right and kept under other units' names: use the name of the unit that was reduced":
        _misnamed,
    "each shard is this rank's own gradient: it was not summed over the ranks":
        lambda c, name, r: c.gradient(r, name)[c.cut(name, r)],
    "each shard is the mean over the ranks: leave the sum":
        lambda c, name, r: c.total(name)[c.cut(name, r)] / c.world_size,
    "each shard is divided by the unit's number of elements: leave the sum":
        lambda c, name, r: c.total(name)[c.cut(name, r)] / c.sizes[name],
    "every rank keeps the whole sum: keep a clone of the chunk that ring.reduce_scatter returns":
        lambda c, name, r: c.total(name),
    "every rank keeps its own whole gradient: reduce it, and keep a clone of the chunk":
        lambda c, name, r: c.gradient(r, name),
    "the sums are right, but each rank keeps the next rank's shard":
        lambda c, name, r: c.total(name)[c.cut(name, r + 1)],
    "the sums are right, but each rank keeps the previous rank's shard":
        lambda c, name, r: c.total(name)[c.cut(name, r - 1)],
    "the sums are right, but every rank keeps rank 0's shard":
        lambda c, name, r: c.total(name)[c.cut(name, 0)],
    "each unit was summed over the ranks twice":
        lambda c, name, r: c.total(name)[c.cut(name, r)] * c.world_size,
    "a unit without a gradient adds ones to the sum: reduce torch.zeros":
        lambda c, name, r: c.total(name)[c.cut(name, r)] + sum(name not in order for order in c.orders),
    "the shards are zeros: were they made and never filled, or reduced again in finish?":
        lambda c, name, r: torch.zeros_like(c.total(name)[c.cut(name, r)]),
}
# fmt: on
