"""Lesson 05's second exercise: the cases, and the shards that common mistakes lead to."""

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import torch

from zerolab import ring
from zerolab.course.evidence import sum_of

MICRO_BATCHES, STEPS, ITEM = 4, 2, 8
Gradients = list[list[torch.Tensor]]  # by micro-batch and rank
Cut = Callable[[int], slice]  # a rank's chunk of the flat buffer


class Case(NamedTuple):
    """The number of ranks, and of the elements of flat."""

    world_size: int
    numel: int

    @property
    def even(self) -> bool:
        return self.numel % self.world_size == 0

    def cut(self, rank: int) -> slice:
        """Return a rank's chunk of flat, the rank counted around."""
        return ring.chunks(self.numel, self.world_size)[rank % self.world_size]

    def length(self, rank: int) -> int:
        own = self.cut(rank)
        return own.stop - own.start

    def gradients(self, step: int) -> Gradients:
        return [
            [gradient(rank, step * MICRO_BATCHES + micro, self.numel) for rank in range(self.world_size)]
            for micro in range(MICRO_BATCHES)
        ]

    def __str__(self) -> str:
        return f"{self.world_size} ranks" if self.even else f"{self.world_size} ranks, {self.numel} elements"


EVEN = (Case(3, 288), Case(2, 192), Case(4, 384))
UNEVEN = (Case(4, 1001), Case(3, 11), Case(4, 9), Case(4, 10))  # a wrong cut shows here


def gradient(rank: int, number: int, numel: int) -> torch.Tensor:
    """Different for every element, rank and micro-batch, which is counted from the first step on."""
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64)


# A sentence, and what it leads to after micro-batch m: g[m][r] are the gradients, `cut` is a chunk by rank.
# fmt: off
MISTAKES: dict[str, Callable[[Gradients, int, int, Cut], torch.Tensor]] = {
    "a rank holds the last micro-batch alone: the earlier ones were overwritten. Add the new shard to `kept`":
        lambda g, m, r, cut: sum_of(g[m])[cut(r)],
    "it holds its own gradient only, without those of the other ranks":
        lambda g, m, r, cut: own(g, m, r)[cut(r)],
    "it holds its own gradient of the last micro-batch only, without the other ranks' and without `kept`":
        lambda g, m, r, cut: g[m][r][cut(r)],
    "that is the mean over the ranks: keep the sum, and divide once, before the update":
        lambda g, m, r, cut: summed(g, m)[cut(r)] / len(g[0]),
    "that is the mean over the micro-batches: keep the sum, and divide once, before the update":
        lambda g, m, r, cut: summed(g, m)[cut(r)] / (m + 1),
    "that is the mean over ranks and micro-batches: keep the sum, and divide once, before the update":
        lambda g, m, r, cut: summed(g, m)[cut(r)] / (m + 1) / len(g[0]),
    "kept + shard is divided at every micro-batch, the earlier ones again and again: keep the sum":
        lambda g, m, r, cut: accumulated(g, m, cut(r), lambda kept, shard: (kept + shard) / len(g[0])),
    "the mean of `kept` and the new shard weighs the last micro-batch as much as all before it: add them":
        lambda g, m, r, cut: reduce(lambda a, b: (a + b) / 2, [sum_of(each)[cut(r)] for each in g[:m + 1]]),
    "the sums are right, but each rank keeps the next rank's shard instead of its own":
        lambda g, m, r, cut: summed(g, m)[cut(r + 1)],
    "the sums are right, but each rank keeps another rank's shard, the previous one's, instead of its own":
        lambda g, m, r, cut: summed(g, m)[cut(r - 1)],
    "the sums are right, but every rank keeps rank 0's shard: it is another rank's shard on all but rank 0":
        lambda g, m, r, cut: summed(g, m)[cut(0)],
    "every rank keeps the whole sum: that is stage 1's memory. Keep the shard that ring.reduce_scatter "
    "returns":
        lambda g, m, r, cut: summed(g, m),
    "every rank keeps its whole own gradient: that is stage 0's memory, and nothing was reduced":
        lambda g, m, r, cut: own(g, m, r),
    "`kept` was already a sum over the ranks, and it was reduced again. Reduce `flat` alone, then add":
        lambda g, m, r, cut: reduced_again(g, m, cut)[r],
    "`kept` was already a sum over the ranks, and it was multiplied by their number: reduce `flat` alone, "
    "then add":
        lambda g, m, r, cut: accumulated(g, m, cut(r), lambda kept, shard: len(g[0]) * kept + shard),
    "it is one micro-batch behind: it returned `kept` as it was, without the new shard":
        lambda g, m, r, cut: summed(g, max(0, m - 1))[cut(r)],
    "`kept` was added twice at every micro-batch":
        lambda g, m, r, cut: accumulated(g, m, cut(r), lambda kept, shard: 2 * kept + shard),
    "the first micro-batch counts twice: at first kept is None, and the shard alone is the sum":
        lambda g, m, r, cut: summed(g, m)[cut(r)] + sum_of(g[0])[cut(r)],
    "the largest of the micro-batches is kept, element by element: add them":
        lambda g, m, r, cut: reduce(torch.maximum, [sum_of(each)[cut(r)] for each in g[:m + 1]]),
    "only the first micro-batch is kept, and the later ones are lost":
        lambda g, m, r, cut: sum_of(g[0])[cut(r)],
}
# fmt: on


def summed(g: Gradients, micro: int) -> torch.Tensor:
    """The sum over the ranks and over the micro-batches up to `micro`."""
    return sum_of(sum_of(each) for each in g[: micro + 1])


def own(g: Gradients, micro: int, rank: int) -> torch.Tensor:
    """One rank's own gradients, summed over the micro-batches up to `micro`."""
    return sum_of(each[rank] for each in g[: micro + 1])


def accumulated(
    g: Gradients, micro: int, piece: slice, add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """What a rank keeps after `micro`, if `add` makes it of what the rank kept before and the new shard."""
    shards = [sum_of(each)[piece] for each in g[: micro + 1]]
    return reduce(add, shards, torch.zeros_like(shards[0]))


def reduced_again(g: Gradients, micro: int, cut: Cut) -> list[torch.Tensor]:
    """What the ranks keep after `micro`, if every micro-batch also sums over the ranks what they kept."""
    kept = [sum_of(g[0])[cut(rank)] for rank in range(len(g[0]))]
    for each in g[1 : micro + 1]:
        kept = [sum_of(each)[cut(rank)] + sum_of(kept) for rank in range(len(each))]
    return kept
