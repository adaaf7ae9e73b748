"""Lesson 00's exercise: average a gradient over the ranks with nothing but send and receive."""

from collections.abc import Callable

import torch

from zerolab.course.exercise import Attempt, attempt, graded

CASES = (2, 3, 4)
NUMEL = 6


@graded("Your average is right on 2, 3 and 4 ranks, and every rank has it.")
def check_average(fn: Callable) -> str | None:
    """Run fn(gradient) on 2, 3 and 4 ranks: every rank must return the mean over the ranks."""
    for world_size in CASES:
        outcome = attempt(fn, [(gradient(rank),) for rank in range(world_size)])
        problem = outcome.failure or _not_an_answer(outcome) or _wrong_value(outcome, world_size)
        if problem:
            return f"{problem} (seen with {world_size} ranks)"
    return None


def gradient(rank: int) -> torch.Tensor:
    """Exact in float64, and so unlike the other ranks' that a sum tells who is in it."""
    return torch.arange(1, NUMEL + 1, dtype=torch.float64) * 1000**rank


def _not_an_answer(outcome: Attempt) -> str | None:
    if outcome.silent:
        return "not written yet: nothing was sent and None was returned"
    if outcome.collectives:
        return f"that calls torch's own {outcome.collectives[0]}, which does it all: here, use send and recv"
    for rank, value in enumerate(outcome.values):
        if not isinstance(value, torch.Tensor) or value.shape != (NUMEL,):
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            return (
                f"rank {rank} returned {type(value).__name__}{shape}; every rank returns the mean, as long "
                "as its gradient"
            )
    return None


def _wrong_value(outcome: Attempt, world_size: int) -> str | None:
    mine = [gradient(rank) for rank in range(world_size)]
    total = sum(mine)
    right = [torch.allclose(value, total / world_size, rtol=1e-12) for value in outcome.values]
    if all(right):
        return None
    first = right.index(False)
    value = outcome.values[first]
    if all(torch.equal(value, own) for value, own in zip(outcome.values, mine, strict=True)):
        return "every rank returned the gradient that it came with: nothing that arrived was used"
    if torch.equal(value, total):
        return "that is the sum, and a mean is meant: divide by world_size, once"
    if torch.allclose(value, total / world_size**2, rtol=1e-12):
        return "the sum was divided by world_size twice"
    for divisor in range(2, 10):
        if torch.allclose(value, total / divisor, rtol=1e-12):
            return (
                f"the sum was divided by {divisor} where there are {world_size} ranks: use "
                "dist.get_world_size()"
            )
    if right[0] and torch.equal(value, mine[first]):
        return (
            f"rank 0 has the mean, but rank {first} still has its own gradient: send the result back to "
            "everyone"
        )
    return (
        f"rank {first} returned neither the mean nor a mistake known here: it has {value.tolist()} and "
        f"should have {(total / world_size).tolist()}"
    )
