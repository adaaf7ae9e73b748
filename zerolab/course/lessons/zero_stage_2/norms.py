"""Lesson 05's exercise on clipping: shards, and the norms and factors that mistakes lead to."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class Case(NamedTuple):
    """The length of each rank's shard, and the largest norm that is allowed; `zeros`: rank 0's are all 0."""

    lengths: tuple[int, ...]
    max_norm: float
    zeros: bool = False

    def shards(self) -> list[torch.Tensor]:
        """Shards of very different norms: those of the last ranks are the largest."""
        made = [
            torch.randn(n, generator=torch.Generator().manual_seed(r)) * (r + 1)
            for r, n in enumerate(self.lengths)
        ]
        return [shard * (not self.zeros or rank > 0) for rank, shard in enumerate(made)]

    def __str__(self) -> str:
        zeros = ", rank 0's all zeros" if self.zeros else ""
        return f"{len(self.lengths)} ranks, max_norm {self.max_norm:g}{zeros}"


# Above max_norm on each rank; above it on some; above it together only; below it; nothing on a rank.
CASES = (
    Case((64, 64, 64), 2.0),
    Case((64, 64, 64, 64), 20.0),
    Case((64, 64), 16.0),
    Case((64, 64, 64), 500.0),
    Case((64, 64), 5.0, zeros=True),
    Case((64, 0), 5.0),
)
Norms = Sequence[float]  # of the shards, by rank
SMALL = 32  # bytes that a rank may send for each rank: a number, also pickled


def whole(norms: Norms) -> float:
    """Return the norm of the whole gradient."""
    return math.hypot(*norms)


# What a rank may take for the norm: a sentence, and the number that it leads to.
# fmt: off
NORMS: dict[str, Callable[[Norms, int], float]] = {
    "that is the norm of this rank's own shard: the other shards belong to the gradient, too":
        lambda norms, r: norms[r],
    "that is the sum of the shards' norms: squares can be added, norms cannot":
        lambda norms, r: sum(norms),
    "that is the largest of the shards' norms: the norm of the whole is the root of the sum of squares":
        lambda norms, r: max(norms),
    "that is the mean of the shards' norms: the norm of the whole is the root of the sum of squares":
        lambda norms, r: sum(norms) / len(norms),
    "that is the sum of the squares: take its root":
        lambda norms, r: whole(norms) ** 2,
    "that is the root of the mean of the squares: do not divide by the number of ranks":
        lambda norms, r: whole(norms) / len(norms) ** 0.5,
    "that is the norm divided by the number of ranks: the sum of squares is not a mean":
        lambda norms, r: whole(norms) / len(norms),
    "that is the root of the sum of the norms: add their squares":
        lambda norms, r: sum(norms) ** 0.5,
    "that is the root of the number of ranks times this rank's own norm: were the squares added over the "
    "ranks?":
        lambda norms, r: len(norms) ** 0.5 * norms[r],
    "that is rank 0's norm on every rank: add the squares of all":
        lambda norms, r: norms[0],
    "that is the norm times the root of the number of ranks: were the squares added over the ranks twice?":
        lambda norms, r: whole(norms) * len(norms) ** 0.5,
    "that is the norm of the other ranks' shards: this rank's own belongs to the gradient, too":
        lambda norms, r: whole([norm for rank, norm in enumerate(norms) if rank != r]),
    "that is the norm times the number of ranks":
        lambda norms, r: whole(norms) * len(norms),
    "that is the smallest of the shards' norms: the norm of the whole is the root of the sum of squares":
        lambda norms, r: min(norms),
}
# fmt: on


def of_elements(case: Case, norms: Norms) -> dict[str, Callable[[Norms, int], Any]]:
    """The same for numbers that need the shards themselves, or max_norm."""
    everything, factor = torch.cat(case.shards()), min(1.0, case.max_norm / whole(norms))
    least = min(case.lengths)
    added = sum(shard[:least] for shard in case.shards())
    return {
        "that is the largest element, the inf-norm: clipping takes the root of the sum of squares": (
            lambda norms, r: everything.abs().max()
        ),
        "that is the sum of the elements' sizes, the 1-norm: clipping takes the root of the sum of squares": (
            lambda norms, r: everything.abs().sum()
        ),
        "that is the sum of the elements: add their squares": lambda norms, r: everything.sum().abs(),
        "that is the norm of the sum of the shards, which are different parts of one gradient: add up the "
        "squares of their norms": lambda norms, r: torch.as_tensor(added).norm(),
        "the squares are averaged over the elements of a shard: add them": (
            lambda norms, r: sum(shard.square().sum() / max(1, len(shard)) for shard in case.shards()) ** 0.5
        ),
        "that is the norm after the clipping: return the one before": lambda norms, r: factor * whole(norms),
        "that is the norm of this rank's own shard after the clipping: return that of the whole gradient "
        "before it": lambda norms, r: factor * norms[r],
        "that is the factor: return the norm": lambda norms, r: factor,
        "that is max_norm: return the norm of the gradient": lambda norms, r: case.max_norm,
    }


# What a rank may multiply its shard by: a sentence, and the factor.
# fmt: off
FACTORS: dict[str, Callable[[Norms, float, int], float]] = {
    "the shard is what it was: scale it in place, shard.mul_(factor)":
        lambda norms, limit, r: 1.0,
    "a gradient below max_norm is scaled up: scale only if the norm (and not its square) is larger than it":
        lambda norms, limit, r: limit / whole(norms),
    "each shard is scaled by its own norm, which changes the direction of the gradient":
        lambda norms, limit, r: min(1.0, limit / max(norms[r], 1e-9)),
    "only ranks whose own norm is too large scale: all scale by one factor":
        lambda norms, limit, r: min(1.0, limit / whole(norms)) if norms[r] > limit else 1.0,
    "the shard is divided by it: multiply by max_norm, too":
        lambda norms, limit, r: 1 / whole(norms) if whole(norms) > limit else 1.0,
    "the shard is divided by it whatever max_norm is":
        lambda norms, limit, r: 1 / whole(norms),
    "the factor is the root of what it should be: it is max_norm / norm":
        lambda norms, limit, r: min(1.0, limit / whole(norms)) ** 0.5,
    "the shard is scaled twice":
        lambda norms, limit, r: min(1.0, limit / whole(norms)) ** 2,
    "the shard is scaled by max_norm over the square of the norm: take the root before you divide":
        lambda norms, limit, r: min(1.0, limit / whole(norms) ** 2),
    "the factor is upside down: it is max_norm / norm":
        lambda norms, limit, r: max(1.0, whole(norms) / limit),
    "large gradients stay as they are and small ones are scaled up: the factor is the smaller of 1 and "
    "max_norm / norm, not the larger":
        lambda norms, limit, r: max(1.0, limit / whole(norms)),
    "the factor is divided by the number of ranks, too":
        lambda norms, limit, r: limit / whole(norms) / len(norms) if whole(norms) > limit else 1.0,
    "each shard gets norm max_norm: the whole gradient has to":
        lambda norms, limit, r: limit / max(norms[r], 1e-9),
    "the shard is set to zeros":
        lambda norms, limit, r: 0.0,
}
# fmt: on
