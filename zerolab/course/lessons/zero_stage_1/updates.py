"""Lesson 04's exercise: which optimizers one rank had, what they updated, and how often."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zerolab.course.lessons.zero_stage_1.world import LR, World


class Updated(NamedTuple):
    """What the optimizers of a rank did.

    Attributes:
        steps: how often an optimizer's step was called; those with a gradient are counted in `with_gradient`.
        place: the range of `flat` that an optimizer has as a view, if it has one.
        kind: the optimizer's class, by name.
        options: in words, the options that are not the ones of ``optimizer_class(..., lr=lr)``.
    """

    steps: int = 0
    with_gradient: int = 0
    place: slice | None = None
    kind: str = ""
    options: str = ""


class Watch:
    """Sees every step that an optimizer takes while `watched` runs."""

    def __init__(self, flat: torch.Tensor):
        self.seen = Updated()
        self._storage = flat.untyped_storage()

    @contextmanager
    def watched(self) -> Iterator[None]:
        handle = register_optimizer_step_pre_hook(self._look)
        try:
            yield
        finally:
            handle.remove()

    def _look(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        views = [p for p in parameters if p.untyped_storage().data_ptr() == self._storage.data_ptr()]
        places = [slice(view.storage_offset(), view.storage_offset() + view.numel()) for view in views]
        self.seen = Updated(
            self.seen.steps + 1,
            self.seen.with_gradient + any(each.grad is not None for each in parameters),
            places[0] if places else self.seen.place,
            type(optimizer).__name__,
            _other_options(optimizer),
        )


def _other_options(optimizer: torch.optim.Optimizer) -> str:
    build: Any = type(optimizer)  # every class of torch.optim takes lr
    plain = build([torch.zeros(1)], lr=LR).param_groups[0]
    group = optimizer.param_groups[0]
    return ", ".join(f"{k}={group[k]}" for k in plain if k != "params" and group.get(k) != plain[k])


def wrong_update(world: World, by_rank: Sequence[Updated], unchanged: bool) -> str | None:
    """Return what is wrong with the optimizers, if that explains wrong parameters, or `unchanged` ones."""
    seen = by_rank[0]
    if unchanged and not seen.steps:
        return (
            "no optimizer took a step, so nothing was updated: call the optimizer's step() once the shard's "
            ".grad is there"
        )
    if unchanged and not seen.with_gradient:
        return (
            "the optimizer took its steps without a gradient, and then it does nothing: before step(), "
            "assign the mean gradient to the .grad of the very tensor that you gave to the optimizer, and do "
            "not clear it"
        )
    if seen.kind not in ("", world.optimizer_class.__name__):
        right = world.optimizer_class.__name__
        return f"the optimizer is {seen.kind}, and optimizer_class is {right} here: build that one"
    others = (_of_another_rank(world, rank, each.place) for rank, each in enumerate(by_rank))
    return next(filter(None, others), None)


def _of_another_rank(world: World, rank: int, place: slice | None) -> str | None:
    """Return whether a rank's optimizer updates the chunk of another rank."""
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
