"""Lesson 03's exercise: the gradients of the ranks, and the results of common mistakes."""

from collections.abc import Callable
from itertools import product, starmap
from typing import NamedTuple

import torch

from zerolab.course.evidence import sum_of

# The gate lacks a gradient in some cases. It is not the last, so that zeros at the end do not stand for it.
SHAPES = {"weight": (8, 6), "gate": (4, 4), "bias": (8,)}
SIZES = [torch.Size(shape).numel() for shape in SHAPES.values()]
PSI = sum(SIZES)


class Case(NamedTuple):
    """Tokens by rank; the rank without a gradient for the gate; the one whose weight gradient is turned."""

    meaning: str
    counts: tuple[int, ...]
    gap: int | None = None
    transposed: int | None = None


CASES = (
    Case("3 ranks with 30, 10 and 20 tokens", (30, 10, 20)),
    Case("2 ranks with 8 tokens each", (8, 8)),
    Case("2 ranks, and no gradient for the gate on rank 1", (8, 24), gap=1),
    Case("2 ranks, and no gradient for the gate on rank 0", (8, 24), gap=0),
    Case("2 ranks, and a transposed weight gradient on rank 1", (8, 24), transposed=1),
    Case("4 ranks with 1, 2, 3 and 4 tokens", (1, 2, 3, 4)),
    Case("1 rank", (8,)),
)

# A sentence, and what it leads to: `g` holds the ranks' gradients, `c` their counts, r is the rank.
# fmt: off
MISTAKES: dict[str, Callable[[list[torch.Tensor], tuple[int, ...], int], torch.Tensor]] = {
    "that is the sum over the ranks, not the mean: with N ranks every step would be N times too long":
        lambda g, c, r: sum_of(g),
    "that is the mean of the ranks' means, and the ranks have different numbers of tokens: multiply each "
    "gradient by its count, and divide by the sum of the counts":
        lambda g, c, r: sum_of(g) / len(g),
    "multiplied by the counts, and never divided by the sum of the counts":
        lambda g, c, r: weighted(g, c),
    "divided once too often: after multiplying by the counts, divide by their sum only":
        lambda g, c, r: weighted(g, c) / sum(c) / len(c),
    "divided by the number of ranks after multiplying by the counts: divide by the sum of the counts":
        lambda g, c, r: weighted(g, c) / len(c),
    "divided by this rank's own count times the number of ranks: the ranks' counts differ, so add them up":
        lambda g, c, r: weighted(g, c) / c[r] / len(c),
    "divided by this rank's own count: divide by the sum of all ranks' counts":
        lambda g, c, r: weighted(g, c) / c[r],
    "divided by the sum of the counts, and never multiplied by them: multiply each gradient by its rank's "
    "count":
        lambda g, c, r: sum_of(g) / sum(c),
    "multiplied by this rank's count after the sum: multiply before it, each gradient by its own rank's "
    "count":
        lambda g, c, r: sum_of(g) * c[r] / sum(c),
    "each gradient was divided by its count: it is a mean already, so multiply by the count":
        lambda g, c, r: sum_of(each / count for each, count in zip(g, c, strict=True)),
    "the gradient is what it was before: contiguous(), flatten() and cat make copies, so copy the average "
    "back into parameter.grad":
        lambda g, c, r: g[r],
    "only multiplied by this rank's count: nothing that the other ranks sent was used":
        lambda g, c, r: g[r] * c[r],
    "only this rank's own share, count/total of its gradient: nothing that the other ranks sent was added":
        lambda g, c, r: g[r] * c[r] / sum(c),
    "every rank has rank 0's gradient: a broadcast copies, and an all-reduce adds":
        lambda g, c, r: g[0],
    "the gradients were multiplied by the counts twice, or the count itself was: divide by the sum of the "
    "counts":
        lambda g, c, r: weighted(g, c) / sum(count * count for count in c),
    "the average was added to the old gradient: put it in its place":
        lambda g, c, r: weighted(g, c) / sum(c) + g[r],
    "the gradients were set to zero and stayed so: copy the average into them":
        lambda g, c, r: torch.zeros_like(g[r]),
}
# fmt: on


class Powers(NamedTuple):
    """The powers in Σ count^of_count · gradient · N^of_ranks · total^of_total; right are 1, 0 and -1."""

    of_count: int
    of_ranks: int
    of_total: int

    def __str__(self) -> str:
        count = _power("count", abs(self.of_count))
        summand = f"{count} · gradient" if self.of_count > 0 else "gradient" + f" / {count}" * bool(count)
        factors = {"N": self.of_ranks, "total": self.of_total}
        times = "".join(f"{_power(name, power)} · " for name, power in factors.items() if power > 0)
        over = "".join(f" / {_power(name, -power)}" for name, power in factors.items() if power < 0)
        return (
            f"that is {times}Σ({summand}){over}, where Σ runs over the ranks, N is their number and total is "
            "the sum of the counts. Right is Σ(count · gradient) / total"
        )

    def value(self, gradients: list[torch.Tensor], counts: tuple[int, ...]) -> torch.Tensor:
        """Return what the formula gives for these gradients and counts."""
        terms = [count**self.of_count * each for count, each in zip(counts, gradients, strict=True)]
        return sum_of(terms) * len(counts) ** self.of_ranks * sum(counts) ** self.of_total


def _power(name: str, power: int) -> str:
    return "" if power == 0 else name if power == 1 else f"{name}^{power}"


TOLD = ((1, 0, -1), (0, 0, 0), (0, -1, 0), (1, 0, 0), (1, -1, -1), (1, -1, 0), (0, 0, -1), (-1, 0, 0))
FORMULAS = {  # the other powers than the right ones and those that MISTAKES tells of
    str(powers): powers
    for powers in starmap(Powers, product((-2, -1, 0, 1, 2), (-2, -1, 0, 1, 2), (-2, -1, 0, 1)))
    if powers not in TOLD
}


def gradient(name: str, rank: int) -> torch.Tensor:
    """Return the gradient that rank brings for a parameter: different for every rank and element."""
    generator = torch.Generator().manual_seed(100 * rank + len(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


def weighted(gradients: list[torch.Tensor], counts: tuple[int, ...]) -> torch.Tensor:
    """Return the sum of the ranks' gradients, each times its count of tokens."""
    return sum_of(count * each for count, each in zip(counts, gradients, strict=True))
