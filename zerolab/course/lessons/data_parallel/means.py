"""Lesson 03's exercise: the averages of common mistakes, and those of other weights and divisors."""

from collections.abc import Callable, Iterator, Mapping
from itertools import product, starmap
from typing import NamedTuple

import torch

from zerolab.course.evidence import sum_of
from zerolab.course.lessons.data_parallel.cases import (
    SHAPES,
    SIZES,
    Case,
    flat,
    parameter,
    transposed,
    weighted,
)

Counts = tuple[int, ...]
LEGEND = "where Σ runs over the ranks, N is their number and total is the sum of the counts"
RIGHT = "Right is Σ(count · gradient) / total"

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
    "the average has the opposite sign: add the gradients up, and do not subtract them":
        lambda g, c, r: -weighted(g, c) / sum(c),
    "that is the mean of the gradients' absolute values: keep their signs":
        lambda g, c, r: weighted([each.abs() for each in g], c) / sum(c),
    "a gradient of two dimensions was transposed, also where it is stored like any other: flatten() follows "
    "the elements, and no t() is needed":
        lambda g, c, r: transposed(weighted(g, c) / sum(c)),
    "the gradients are zeros: copy the averages into them":
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
        return f"that is {times}Σ({summand}){over}, {LEGEND}. {RIGHT}"

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


# The weights and divisors that FORMULAS and MISTAKES know. Each other one is tried with these.
USUAL = ("count · gradient", "gradient", "total", "N", "1", "own count")
# What a gradient may be multiplied by: from the counts and its rank. What the sum may be divided by: from the
# counts and the rank that divides.
NUMEL = torch.cat([torch.full((size,), float(size), dtype=torch.float64) for size in SIZES])
# fmt: off
WEIGHTS: Mapping[str, Callable[[Counts, int], float | torch.Tensor]] = {
    "count · gradient": lambda c, s: c[s],
    "gradient": lambda c, s: 1,
    "numel · gradient": lambda c, s: NUMEL,
    "count · numel · gradient": lambda c, s: c[s] * NUMEL,
    "√count · gradient": lambda c, s: c[s] ** 0.5,
    "(count // total) · gradient": lambda c, s: c[s] // sum(c),
    "(rank + 1) · gradient": lambda c, s: s + 1,
    "rank · gradient": lambda c, s: s,
}
DIVISORS: Mapping[str, Callable[[Counts, int], float | torch.Tensor]] = {
    "total": lambda c, r: sum(c),
    "N": lambda c, r: len(c),
    "1": lambda c, r: 1,
    "(N - 1)": lambda c, r: max(len(c) - 1, 1),
    "(total - 1)": lambda c, r: sum(c) - 1,
    "(total - own count)": lambda c, r: sum(c) - c[r] or 1,
    "own count": lambda c, r: c[r],
    "max(count)": lambda c, r: max(c),
    "min(count)": lambda c, r: min(c),
    "(count of rank 0)": lambda c, r: c[0],
    "(N · max(count))": lambda c, r: len(c) * max(c),
    "(N · min(count))": lambda c, r: len(c) * min(c),
    "(N · count of rank 0)": lambda c, r: len(c) * c[0],
    "(total · own count)": lambda c, r: sum(c) * c[r],
    "(total · numel)": lambda c, r: sum(c) * NUMEL,
    "numel": lambda c, r: NUMEL,
    "Σ numel": lambda c, r: sum(SIZES),
}
# fmt: on


def _of_formula(g: list[torch.Tensor], c: Counts, r: int, weight: str, divisor: str) -> torch.Tensor:
    terms = [WEIGHTS[weight](c, rank) * each for rank, each in enumerate(g)]
    return (sum_of(terms) / DIVISORS[divisor](c, r)).to(g[0].dtype)


def mistakes(case: Case) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Each sentence, with what all ranks end with."""
    g, c = case.brought(), case.counts
    ranks = range(len(c))
    for why, value in MISTAKES.items():
        yield why, [value(g, c, rank) for rank in ranks]
    for why, powers in FORMULAS.items():
        yield why, [powers.value(g, c)] * len(c)
    for weight, divisor in product(WEIGHTS, DIVISORS):
        alone = weight.startswith("(count // total)") and divisor != "1"  # a share is divided already
        if (weight in USUAL) != (divisor in USUAL) and not alone:
            over = "" if divisor == "1" else f" / {divisor}"
            said = f"that is Σ({weight}){over}, {LEGEND}. {RIGHT}"
            yield said, [_of_formula(g, c, rank, weight, divisor) for rank in ranks]
    yield from _of_parameters(case)


def _of_parameters(case: Case) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """The same with the parameters' own values in place of their gradients."""
    values = [flat(parameter(name, rank, case.dtype) for name in SHAPES) for rank in range(len(case.counts))]
    why = "and not of their gradients: flatten parameter.grad, and not the parameter"
    for what, value in {
        f"that is the mean of the parameters' values {why}": weighted(values, case.counts) / sum(case.counts),
        f"that is the mean of the parameters' values over the ranks {why}": sum_of(values) / len(values),
        f"that is the sum of the parameters' values {why}": sum_of(values),
        f"that is the sum of the parameters' values times the counts {why}": weighted(values, case.counts),
    }.items():
        yield what, [value] * len(values)
