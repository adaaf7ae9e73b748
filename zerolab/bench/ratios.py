"""Compare contestants round by round; a ratio is the median over the rounds.

Steps a second apart run under the same other load on the machine; steps a minute apart may not. So the
quotient is taken within a round, where a disturbance most likely affects both sides. The median is taken
after that. The quotient of two medians would compare steps that were far apart in time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TypeVar

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Spread:
    """A median, with the quartiles that say how far to trust it."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles; of one value, that value. Raises: ValueError for none."""
    if not values:
        raise ValueError("no rounds to take a median of: run at least one")
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * list(values)
    return Spread(median(values), low, high)


def pairwise(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Our seconds over theirs, round by round. Raises: ValueError where the rounds do not pair up."""
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} rounds cannot be paired with {len(theirs)}: both sides need the same")
    return spread([mine / other for mine, other in zip(ours, theirs, strict=True)])


def slowest(by_rank: Sequence[Sequence[Number]]) -> list[Number]:
    """For each round, the largest number of all ranks: a step is over when the last rank's is."""
    return [max(seconds) for seconds in zip(*by_rank, strict=True)]
