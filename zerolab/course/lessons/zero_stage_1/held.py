"""Lesson 04's second exercise: the target for memory, a step without a second whole buffer."""

from collections.abc import Callable

import torch

from zerolab.course.attempts import attempt
from zerolab.course.lessons.zero_stage_1.world import LR, World
from zerolab.course.peak import Peak
from zerolab.course.targets import Reached, silver

WORLD = World(4, 1001, torch.optim.SGD)  # without optimizer state, so that only buffers count


def held_too_much(cls: Callable) -> Reached | None:
    """Whether a right step has a tensor as large as flat, beside flat and the gradient, on some rank."""
    outcome = attempt(_largest, [(cls, rank) for rank in range(WORLD.world_size)])
    for rank, largest in enumerate(outcome.values):
        if largest >= WORLD.start.nbytes:
            return silver(
                f"with {WORLD.world_size} ranks, rank {rank} has a tensor of {largest} bytes in a step, "
                f"beside flat and the gradient, which have {WORLD.start.nbytes} each. Work on slices of the "
                "two, without a whole copy of them, padded or not"
            )
    return None


def _largest(cls: Callable, rank: int) -> int:
    """In the worker: the bytes of the largest tensor in the second step beside those that it is given."""
    flat = WORLD.start
    mine = cls(flat, WORLD.optimizer_class, LR)
    mine.step(WORLD.gradient(0, rank))
    gradient = WORLD.gradient(1, rank)
    with Peak([flat, gradient]) as peak:
        mine.step(gradient)
    return peak.largest
