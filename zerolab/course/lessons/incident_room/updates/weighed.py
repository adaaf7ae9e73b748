"""Lesson 09: by which numbers of samples an update weighs the micro-batches, where these differ in length.

The right weight is a micro-batch's own number of samples over that of all. A wrong one is a product of few
numbers, too, so each product is tried.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

import torch

from zerolab.course.lessons.incident_room.room import Case, batches

POWERS = {
    1: "each gradient is multiplied by the samples of its own micro-batch",
    0: "no gradient is multiplied by its samples (batch.gradient is a mean)",
    2: "each gradient is multiplied by the samples of its micro-batch twice",
    -1: "each gradient is divided by the samples of its micro-batch, of which it is the mean already",
    0.5: "each gradient is multiplied by the root of its samples",
}


class Weights(NamedTuple):
    """A product: in words, its numbers by owner, rank and micro-batch, and how unlikely it is."""

    words: tuple[str, ...]
    numbers: torch.Tensor
    cost: float


def samples(case: Case) -> torch.Tensor:
    """By rank and micro-batch."""
    own = [[len(batch) for batch in batches(case, rank)] for rank in range(case.ranks)]
    return torch.tensor(own, dtype=torch.float64)


def told(counts: torch.Tensor, case: Case) -> str | None:
    """The product that the weights are, from how often the gradients count, where 1 is right."""
    each = samples(case)
    weights = counts.double() * each / each.sum()
    for made in sorted(_products(each), key=lambda made: made.cost):
        ratios = weights / made.numbers
        if torch.allclose(ratios, ratios.flatten()[0].expand_as(ratios), rtol=1e-6, atol=0):
            number = 1 / float(ratios.flatten()[0])
            divided = f"the sum is divided by {_divisor(number, each)}"
            if abs(number - 1) < 1e-6:
                divides = any("divide" in word for word in made.words)
                divided = f"nothing {'else ' * divides}divides the sum"
            return (
                f"{', '.join(made.words)}, and {divided}. Multiply each gradient by "
                f"the samples of its own micro-batch, and divide the sum by those of all, {each.sum():.0f}"
            )
    return None


def _products(each: torch.Tensor) -> Iterator[Weights]:
    """All products of a power of the own samples, a number of the rank, and one of the shard's owner."""
    ones = torch.ones(len(each), *each.shape, dtype=torch.float64)
    for (power, words), by_rank, by_owner in product(POWERS.items(), _by_rank(each), _by_owner(each)):
        yield Weights(
            (words, *by_rank.words, *by_owner.words),
            ones * each**power * by_rank.numbers * by_owner.numbers,
            list(POWERS).index(power) + by_rank.cost + by_owner.cost,
        )


def _of_one_rank(each: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Numbers that each rank has, by name."""
    return {
        "all its rank's samples": each.sum(dim=1),
        "the samples of its rank's first micro-batch, which is the largest": each[:, 0],
        "the samples of its rank's last micro-batch, which is the smallest": each[:, -1],
    }


def _by_rank(each: torch.Tensor) -> list[Weights]:
    found = [Weights((), torch.ones(1, 1, 1, dtype=torch.float64), 0)]
    for name, numbers in _of_one_rank(each).items():
        by = numbers.view(1, -1, 1)
        found += [Weights((f"divided by {name}",), 1 / by, 1), Weights((f"multiplied by {name}",), by, 2)]
    return found


def _by_owner(each: torch.Tensor) -> list[Weights]:
    """What a rank makes of its shard after the reduction, when the gradients of all are in it."""
    found = [Weights((), torch.ones(1, 1, 1, dtype=torch.float64), 0)]
    after = "and after the reduction, when the gradients of all ranks are in the shard, the owner"
    those = {"the samples of its own micro-batch": each.unsqueeze(1)}
    those |= {
        name.replace("its rank's", "its own"): numbers.view(-1, 1, 1)
        for name, numbers in _of_one_rank(each).items()
    }
    for name, numbers in those.items():
        found.append(Weights((f"{after} multiplies by {name}",), numbers, 1.5))
        found.append(Weights((f"{after} divides by {name}",), 1 / numbers, 1.5))
    return found


def _divisor(number: float, each: torch.Tensor) -> str:
    """What the sum is divided by, and which number of samples that is."""
    n, m = each.shape
    of_rank = each.sum(dim=1)
    known = {
        "1": 1.0,
        "the samples of all ranks": float(each.sum()),
        "the largest number of samples of a rank": float(of_rank.max()),
        "the samples of rank 0": float(of_rank[0]),
        "the samples of the last rank": float(of_rank[-1]),
        "the samples of all ranks' first micro-batches": float(each[:, 0].sum()),
        "the samples of all ranks' last micro-batches": float(each[:, -1].sum()),
        "the samples of the largest micro-batch": float(each.max()),
        "the sum of all squared numbers of samples": float(each.square().sum()),
    }
    by = {"": 1.0, "N times ": n, "M times ": m, "N·M times ": n * m}
    by |= {"an N-th of ": 1 / n, "an M-th of ": 1 / m}
    found = [
        f"{times}{name}".replace("N times 1", "N").replace("M times 1", "M").replace("·M times 1", "·M")
        for (times, size), (name, value) in product(by.items(), known.items())
        if abs(number - size * value) < 1e-6 * abs(number) and (size != 1 or not times)
    ]
    return f"{number:.4g} ({' or '.join(found[:2])})" if found else f"{number:.4g}"


def of_samples(times: float, case: Case) -> str:
    """How many samples a mean gradient of so many times the right length would be the mean of."""
    each = samples(case)
    total = float(each.sum())
    made = _divisor(total / times, each)
    return f": the sum is divided by {made}, and all ranks together have {total:.0f} samples"
