"""Lesson 04's exercise: what the optimizers of one rank updated, and how often."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zerolab.course.lessons.zero_stage_1.world import World


class Updates:
    """Counts the steps of every optimizer, and notes which part of `flat` they update.

    Attributes:
        steps: how often an optimizer's step was called; those with a gradient are counted in `with_gradient`.
        place: the range of `flat` that an optimizer has as a view, if it has one.
        kind: the optimizer's class, by name.
    """

    def __init__(self, flat: torch.Tensor):
        self.steps, self.with_gradient = 0, 0
        self.place: slice | None = None
        self.kind = ""
        self._flat = flat

    @contextmanager
    def counted(self) -> Iterator["Updates"]:
        """Count while the block runs."""
        handle = register_optimizer_step_pre_hook(self._look)
        try:
            yield self
        finally:
            handle.remove()

    def _look(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self.steps, self.kind = self.steps + 1, type(optimizer).__name__
        self.with_gradient += any(each.grad is not None for each in parameters)
        for each in parameters:
            if each.untyped_storage().data_ptr() == self._flat.untyped_storage().data_ptr():
                self.place = slice(each.storage_offset(), each.storage_offset() + each.numel())


def nothing_updated(steps: int, with_gradient: int) -> str | None:
    """Why parameters are as they were, although something was sent."""
    if not steps:
        return (
            "no optimizer took a step, so nothing was updated: call the optimizer's step() once the shard's "
            ".grad is there"
        )
    if not with_gradient:
        return (
            "the optimizer took its steps without a gradient, and then it does nothing: before step(), "
            "assign the mean gradient to the .grad of the very tensor that you gave to the optimizer, and do "
            "not clear it"
        )
    return None


def of_another_rank(world: World, rank: int, place: slice | None) -> str | None:
    """Whether a rank's optimizer updates the chunk of another rank."""
    if place is None or place == world.cut(rank):
        return None
    for other in range(world.world_size):
        if place == world.cut(other):
            return (
                f"rank {rank}'s optimizer has elements {place.start} to {place.stop} of flat, which are rank "
                f"{other}'s: ring.reduce_scatter and ring.all_gather take chunk {rank} on rank {rank}, so "
                "cut with your own rank"
            )
    return None
