"""Lesson 04's second exercise: the target for memory, a step without a second whole buffer."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from zerolab.course.alive import Alive, first_name, kept_by
from zerolab.course.attempts import attempt
from zerolab.course.lessons.zero_stage_1.world import LR, World
from zerolab.course.peak import Peak
from zerolab.course.targets import Reached, silver

WORLD = World(4, 1001, torch.optim.SGD)  # without optimizer state, so that only buffers count


class Largest(NamedTuple):
    """The bytes of the largest tensors, during a step and kept after it, beside those that were given."""

    in_step: int
    kept: int
    name: str | None


def held_too_much(cls: Callable) -> Reached | None:
    """Whether a step has, or the class keeps, a tensor as large as flat, beside flat and the gradient."""
    outcome = attempt(_largest, [(cls, rank) for rank in range(WORLD.world_size)])
    for rank, largest in enumerate(outcome.values):
        if largest.kept:
            name = f" (look at `{largest.name}`)" if largest.name else ""
            return silver(
                f"with {WORLD.world_size} ranks, rank {rank} keeps a tensor of {largest.kept} bytes between "
                f"the steps{name}, beside flat, which has {WORLD.start.nbytes}. Keep no tensor of this size, "
                "and no view of one: a view keeps the whole storage"
            )
        if largest.in_step >= WORLD.start.nbytes:
            return silver(
                f"with {WORLD.world_size} ranks, rank {rank} has a tensor of {largest.in_step} bytes in a "
                f"step, beside flat and the gradient, which have {WORLD.start.nbytes} each. Work on slices "
                "of the two, without a whole copy of them, padded or not"
            )
    return None


def _largest(cls: Callable, rank: int) -> Largest:
    """In the worker: the largest tensor in the second step and after it, beside those that it is given."""
    flat, first, gradient = WORLD.start, WORLD.gradient(0, rank), WORLD.gradient(1, rank)
    alive = Alive()
    mine = cls(flat, WORLD.optimizer_class, LR)
    mine.step(first)
    with Peak([flat, gradient]) as peak:
        mine.step(gradient)
    kept = alive.storages(at_least=flat.nbytes).values()
    name = first_name(kept_by(tensor, self=mine) for tensor in kept)
    return Largest(peak.largest, max((each.untyped_storage().nbytes() for each in kept), default=0), name)
