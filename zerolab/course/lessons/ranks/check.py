"""Lesson 00's exercise: average a gradient over the ranks with send and receive only."""

from collections.abc import Callable

import torch

from zerolab.course.exercise import Attempt, attempt, graded, total

CASES = (2, 3, 4)
NUMEL = 6


@graded("Your average is right on 2, 3 and 4 ranks, and every rank has it.")
def check_average(fn: Callable) -> str | None:
    """Run fn(gradient) on 2, 3 and 4 ranks: every rank must return the mean over the ranks."""
    for world_size in CASES:
        outcome = attempt(fn, [(gradient(rank),) for rank in range(world_size)])
        problem = (
            outcome.unusable("send and recv") or _not_a_mean(outcome) or _wrong_value(outcome, world_size)
        )
        if problem:
            return f"{problem} (seen with {world_size} ranks)"
    return None


def gradient(rank: int) -> torch.Tensor:
    """Exact in float64, and so different from the other ranks' that a sum shows which ranks are in it."""
    return torch.arange(1, NUMEL + 1, dtype=torch.float64) * 1000**rank


def _not_a_mean(outcome: Attempt) -> str | None:
    for rank, value in enumerate(outcome.values):
        if not isinstance(value, torch.Tensor) or value.shape != (NUMEL,):
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            what = f"rank {rank} returned {type(value).__name__}{shape}"
            return f"{what}; every rank returns the mean, which has the shape of its gradient"
    return None


def _wrong_value(outcome: Attempt, world_size: int) -> str | None:
    mine = [gradient(rank) for rank in range(world_size)]
    summed = total(mine)
    right = [torch.allclose(value, summed / world_size, rtol=1e-12) for value in outcome.values]
    if all(right):
        return None
    first = right.index(False)
    value = outcome.values[first]
    if all(torch.equal(value, own) for value, own in zip(outcome.values, mine, strict=True)):
        return "every rank returned its own gradient: nothing that arrived was used"
    if torch.equal(value, summed):
        return "that is the sum, and the exercise asks for the mean: divide by world_size, once"
    if torch.allclose(value, summed / world_size**2, rtol=1e-12):
        return "the sum was divided by world_size twice"
    for divisor in range(2, 10):
        if torch.allclose(value, summed / divisor, rtol=1e-12):
            there_are = f"the sum was divided by {divisor} where there are {world_size} ranks"
            return f"{there_are}: use dist.get_world_size()"
    if right[0] and torch.equal(value, mine[first]):
        has = f"rank 0 has the mean, but rank {first} still has its own gradient"
        return f"{has}: send the result back to all ranks"
    wanted = (summed / world_size).tolist()
    return f"rank {first} returned {value.tolist()} and not the mean, {wanted}; no known mistake explains it"
