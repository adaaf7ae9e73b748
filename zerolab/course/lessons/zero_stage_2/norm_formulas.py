"""Lesson 05's exercise on clipping: norms and factors that are composed of other parts than the right ones.

The right norm is the root of the sum of the squares of the shards' norms. The right factor is max_norm / norm
where the norm is larger, and 1 elsewhere. Each part may be another one, so a few parts name many mistakes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product

import torch

from zerolab.course.lessons.zero_stage_2.norms import CASES, FACTORS, NORMS, Case, of_elements, whole

ByCase = dict[Case, list[float]]  # by rank

Factor = Callable[[Sequence[float], float, int], float]  # of the shards' norms, max_norm and a rank

# What a rank may compute of a shard: in words of all the shards, in words of one, and as a function.
OF_A_SHARD: tuple[tuple[str, str, Callable[[torch.Tensor], float]], ...] = (
    ("the shards' norms", "the norm of", lambda shard: float(shard.norm())),
    (
        "the squares of the shards' norms",
        "the square of the norm of",
        lambda shard: float(shard.square().sum()),
    ),
    ("the sums of the shards' elements", "the sum of the elements of", lambda shard: float(shard.sum())),
    (
        "the squares of the sums of the shards' elements",
        "the square of the sum of the elements of",
        lambda shard: float(shard.sum()) ** 2,
    ),
    (
        "the sums of the absolute values in the shards",
        "the sum of the absolute values in",
        lambda shard: float(shard.abs().sum()),
    ),
    (
        "the largest absolute values in the shards",
        "the largest absolute value in",
        lambda shard: float(shard.abs().max()) if len(shard) else 0.0,
    ),
    (
        "the mean squares of the shards",
        "the mean square of",
        lambda shard: float(shard.square().sum()) / max(1, len(shard)),
    ),
)
# How the numbers of the ranks may be taken together.
TOGETHER: dict[str, Callable[[list[float], int], float]] = {
    "the sum of": lambda numbers, rank: sum(numbers),
    "the mean of": lambda numbers, rank: sum(numbers) / len(numbers),
    "the largest of": lambda numbers, rank: max(numbers),
    "the smallest of": lambda numbers, rank: min(numbers),
    "the product of": lambda numbers, rank: math.prod(numbers),
    "the sum over the other ranks of": lambda numbers, rank: sum(numbers) - numbers[rank],
    "the sum over this rank and those before it of": lambda numbers, rank: sum(numbers[: rank + 1]),
    "the sum, with this rank's own once more, of": lambda numbers, rank: sum(numbers) + numbers[rank],
}
# Or the number of a single rank may be taken.
ALONE: dict[str, Callable[[list[float], int], float]] = {
    "this rank's own shard": lambda numbers, rank: numbers[rank],
    "rank 0's shard": lambda numbers, rank: numbers[0],
    "the last rank's shard": lambda numbers, rank: numbers[-1],
}
# What may be done with the result.
AT_LAST: dict[str, Callable[[float, int], float]] = {
    "": lambda value, size: value,
    "the root of ": lambda value, size: abs(value) ** 0.5,
    "the square of ": lambda value, size: value**2,
    "N times ": lambda value, size: value * size,
    "1/N of ": lambda value, size: value / size,
    "N times the root of ": lambda value, size: size * abs(value) ** 0.5,
    "1/N of the root of ": lambda value, size: abs(value) ** 0.5 / size,
    "the root of N times ": lambda value, size: (size * abs(value)) ** 0.5,
    "the root of 1/N of ": lambda value, size: (abs(value) / size) ** 0.5,
}
ADVICE = "The norm is the root of the sum of the squares of the shards' norms"

ABOVE: dict[str, Callable[[Sequence[float], float, int], float]] = {
    "max_norm": lambda norms, limit, rank: limit,
    "1": lambda norms, limit, rank: 1.0,
    "the square of max_norm": lambda norms, limit, rank: limit**2,
    "the root of max_norm": lambda norms, limit, rank: limit**0.5,
    "max_norm / N": lambda norms, limit, rank: limit / len(norms),
    "N * max_norm": lambda norms, limit, rank: limit * len(norms),
    "max_norm / the root of N": lambda norms, limit, rank: limit / len(norms) ** 0.5,
}
BELOW: dict[str, Callable[[Sequence[float], float, int], float]] = {
    "norm": lambda norms, limit, rank: math.hypot(*norms),
    "the square of the norm": lambda norms, limit, rank: math.hypot(*norms) ** 2,
    "the root of the norm": lambda norms, limit, rank: math.hypot(*norms) ** 0.5,
    "the norm of this rank's own shard": lambda norms, limit, rank: norms[rank],
    "the square of the norm of this rank's own shard": lambda norms, limit, rank: norms[rank] ** 2,
    "the sum of the shards' norms": lambda norms, limit, rank: sum(norms),
    "the mean of the shards' norms": lambda norms, limit, rank: sum(norms) / len(norms),
    "the largest of the shards' norms": lambda norms, limit, rank: max(norms),
    "the norm of rank 0's shard": lambda norms, limit, rank: norms[0],
    "(norm - max_norm)": lambda norms, limit, rank: math.hypot(*norms) - limit,
    "(norm + max_norm)": lambda norms, limit, rank: math.hypot(*norms) + limit,
    "1": lambda norms, limit, rank: 1.0,
}
WHERE: dict[str, Callable[[float, Sequence[float], float, int], bool]] = {
    "where the norm is larger than max_norm": lambda f, norms, limit, rank: math.hypot(*norms) > limit,
    "where that is less than 1": lambda f, norms, limit, rank: f < 1,
    "where this rank's own norm is larger than max_norm": lambda f, norms, limit, rank: norms[rank] > limit,
    "where the norm is smaller than max_norm": lambda f, norms, limit, rank: math.hypot(*norms) < limit,
    "whatever the norm is": lambda f, norms, limit, rank: True,
}
_PROBES = (([3.0, 5.0, 7.0], 4.0), ([2.0, 9.0], 20.0), ([6.0, 1.5, 4.0, 8.0], 7.0))  # norms, max_norm


@cache
def norms() -> dict[str, ByCase]:
    """What each wrong way leads to on each rank, by case.

    The right way and those that have a sentence of their own are left out, and of ways that never differ all
    but the first.
    """
    seen = {_key(each) for each in _named()}
    found: dict[str, ByCase] = {}
    for (last, ending), (said, taken) in product(AT_LAST.items(), _taken().items()):
        by_case = {case: _by_rank(taken(case), ending) for case in CASES}
        if (key := _key(by_case)) not in seen:
            seen.add(key)
            found[f"that is {last}{said}. {ADVICE}"] = by_case
    return found


def _named() -> Iterator[ByCase]:
    """What the right way leads to, and each that has a sentence of its own."""
    of_shards = {case: [float(shard.norm()) for shard in case.shards()] for case in CASES}
    yield {case: [whole(of)] for case, of in of_shards.items()}
    ways = {case: NORMS | of_elements(case, of) for case, of in of_shards.items()}
    for why in ways[CASES[0]]:
        yield {c: [float(ways[c][why](of, r)) for r in range(len(of))] for c, of in of_shards.items()}


@cache
def _taken() -> dict[str, Callable[[Case], list[float]]]:
    """What a rank may take of the shards' numbers, in words and as a function: a number on each rank."""

    def by_rank(of_a_shard: Callable, choice: Callable, case: Case) -> list[float]:
        numbers = [of_a_shard(shard) for shard in case.shards()]
        return [choice(numbers, rank) for rank in range(len(numbers))]

    found: dict[str, Callable[[Case], list[float]]] = {}
    for of_all, of_one, of_a_shard in OF_A_SHARD:
        for words, choice in TOGETHER.items():
            found[f"{words} {of_all}"] = partial(by_rank, of_a_shard, choice)
        for words, choice in ALONE.items():
            found[f"{of_one} {words}"] = partial(by_rank, of_a_shard, choice)
    return found


def _by_rank(numbers: list[float], ending: Callable[[float, int], float]) -> list[float]:
    return [ending(number, len(numbers)) for number in numbers]


def _key(by_case: ByCase) -> str:
    """The numbers of all cases up to rounding; a number that all ranks have counts once."""
    rounded = ([f"{value:.5g}" for value in values] for values in by_case.values())
    return " ".join(" ".join(each[:1] if len(set(each)) == 1 else each) for each in rounded)


@cache
def factors() -> dict[str, Factor]:
    """Each wrong way to a factor, in words and as a function, left out as in norms."""
    right = _factor("max_norm", "norm", "where the norm is larger than max_norm")
    seen = {_probed(each) for each in (right, *FACTORS.values())}
    found: dict[str, Factor] = {}
    for above, below, where in product(ABOVE, BELOW, WHERE):
        formula = _factor(above, below, where)
        if (probed := _probed(formula)) not in seen:
            seen.add(probed)
            said = f"the shard is multiplied by {above} / {below}, {where}".replace(" / 1,", ",")
            found[f"{said}: multiply by max_norm / norm where the norm is larger"] = formula
    return found


def _probed(formula: Factor) -> tuple[float, ...]:
    return tuple(round(formula(norms, limit, r), 9) for norms, limit in _PROBES for r in range(len(norms)))


def _factor(above: str, below: str, where: str) -> Factor:
    def value(norms: Sequence[float], limit: float, rank: int) -> float:
        factor = ABOVE[above](norms, limit, rank) / (BELOW[below](norms, limit, rank) or 1.0)
        return factor if WHERE[where](factor, norms, limit, rank) else 1.0

    return value
