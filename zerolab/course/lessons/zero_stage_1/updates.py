"""Lesson 04's exercise: which optimizers a rank had, which steps they took, and with which gradients."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zerolab.course.lessons.zero_stage_1.world import LR, STEPS, World


class Taken(NamedTuple):
    """One step of an optimizer. Its numbers are arrays, because tensors would count as the reader's.

    Attributes:
        training_step: in which call of the reader's step, counted from 0.
        optimizer: which of the rank's optimizers.
        places: the ranges of `flat` that its parameters are views of.
        gradient: of all its parameters, end to end; None if none has one.
        after: `flat` when the optimizer had taken the step.
    """

    training_step: int
    optimizer: int
    places: list[slice]
    gradient: np.ndarray | None
    after: np.ndarray

    @property
    def place(self) -> slice | None:
        return self.places[0] if len(self.places) == 1 else None


class Updated(NamedTuple):
    """What the optimizers of a rank did.

    Attributes:
        taken: the steps that they took, in order.
        kind: the class of the last one, by name.
        options: in words, its options that are not the ones of ``optimizer_class(..., lr=lr)``.
    """

    taken: Sequence[Taken] = ()
    kind: str = ""
    options: str = ""

    def of(self, training_step: int) -> list[Taken]:
        return [each for each in self.taken if each.training_step == training_step]


class Watch:
    """Sees every step that an optimizer takes while `watched` runs. `training_step` is set from outside."""

    def __init__(self, flat: torch.Tensor):
        self.seen = Updated()
        self.training_step = 0
        self._flat = flat
        self._optimizers: list[int] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        storage = self._flat.untyped_storage().data_ptr()
        views = [p for p in parameters if p.untyped_storage().data_ptr() == storage]
        places = [slice(view.storage_offset(), view.storage_offset() + view.numel()) for view in views]
        gradients = [_array(each.grad).ravel() for each in parameters if each.grad is not None]
        if id(optimizer) not in self._optimizers:
            self._optimizers.append(id(optimizer))
        taken = Taken(
            self.training_step,
            self._optimizers.index(id(optimizer)),
            places,
            np.concatenate(gradients) if gradients else None,
            _array(self._flat),
        )
        kind, options = type(optimizer).__name__, _other_options(optimizer)
        self.seen = Updated([*self.seen.taken, taken], kind, options)

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        *before, last = self.seen.taken
        self.seen = self.seen._replace(taken=[*before, last._replace(after=_array(self._flat))])


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().copy()


def _other_options(optimizer: torch.optim.Optimizer) -> str:
    build: Any = type(optimizer)  # every class of torch.optim takes lr
    plain = build([torch.zeros(1)], lr=LR).param_groups[0]
    group = optimizer.param_groups[0]
    return ", ".join(f"{k}={group[k]}" for k in plain if k != "params" and group.get(k) != plain[k])


def wrong_update(world: World, by_rank: Sequence[Updated], unchanged: bool, ring: bool) -> str | None:
    """Return what is wrong with the optimizers, if that explains wrong parameters, or `unchanged` ones.

    `ring`: whether zerolab's own collectives were called, which cut with ring.chunks.
    """
    return (
        _never(by_rank, unchanged)
        or _without_gradient(by_rank, unchanged)
        or _of_another_class(world, by_rank[0])
        or _not_once(by_rank)
        or next((why for rank, each in enumerate(by_rank) if ring and (why := _cut(world, rank, each))), None)
    )


def _never(by_rank: Sequence[Updated], unchanged: bool) -> str | None:
    idle = [rank for rank, each in enumerate(by_rank) if not each.taken]
    if len(idle) == len(by_rank):
        if unchanged:
            return (
                "no optimizer took a step, so nothing was updated: call the optimizer's step() once the "
                "shard's .grad is there"
            )
        return (
            "no optimizer took a step, and flat was changed without one: build optimizer_class([shard], "
            "lr=lr) once, and call its step(). Another formula than the optimizer's gives other parameters"
        )
    if idle:
        return (
            f"rank {idle[0]}'s optimizer took no step, and those of other ranks did: every rank updates its "
            "own shard"
        )
    return None


def _without_gradient(by_rank: Sequence[Updated], unchanged: bool) -> str | None:
    empty = [taken for each in by_rank for taken in each.taken if taken.gradient is None]
    if unchanged and len(empty) == sum(len(each.taken) for each in by_rank):
        return (
            "the optimizer took its steps without a gradient, and then it does nothing: before step(), "
            "assign the mean gradient to the .grad of the very tensor that you gave to the optimizer, and do "
            "not clear it"
        )
    given = [taken.gradient for each in by_rank for taken in each.taken if taken.gradient is not None]
    if unchanged and not any(gradient.any() for gradient in given):
        return (
            "the optimizer's gradient is 0 in all elements and steps, so it changes nothing: assign the mean "
            "gradient to the shard's .grad"
        )
    if empty:
        return (
            f"in training step {empty[0].training_step}, counted from 0, the optimizer took its step without "
            "a gradient: assign the mean gradient to the shard's .grad before you call the optimizer's step()"
        )
    return None


def _of_another_class(world: World, seen: Updated) -> str | None:
    right = world.optimizer_class.__name__
    if seen.kind == right:
        return None
    return f"the optimizer is {seen.kind}, and optimizer_class is {right} here: build that one"


def _not_once(by_rank: Sequence[Updated]) -> str | None:
    """Whether the one optimizer of a rank took other than one step in a training step."""
    if any(taken.optimizer != each.taken[0].optimizer for each in by_rank for taken in each.taken):
        return None
    counts = [[len(each.of(step)) for step in range(STEPS)] for each in by_rank]
    if all(set(own) == {2} for own in counts):
        return "each step is taken twice: call the optimizer's step once"
    for rank, own in enumerate(counts):
        if set(own) != {1}:
            taken = ", ".join(map(str, own))
            return (
                f"in {STEPS} training steps rank {rank}'s optimizer took {taken} steps: call its step() once "
                "in each"
            )
    return None


def _cut(world: World, rank: int, updated: Updated) -> str | None:
    """Return whether a rank's optimizer has other elements than the rank's chunk, and how they were cut."""
    place, right = updated.taken[0].place, world.cut(rank)
    if place is None or place in (right, slice(0, world.numel)):  # a whole state is looked at elsewhere
        return None
    has = f"rank {rank}'s optimizer has elements {place.start} to {place.stop} of flat"
    for other in range(world.world_size):
        if place == world.cut(other):
            return (
                f"{has}, which are rank {other}'s: ring.reduce_scatter and ring.all_gather take chunk {rank} "
                f"on rank {rank}, so cut with your own rank"
            )
    return (
        f"{has}, and ring.reduce_scatter and ring.all_gather take elements {right.start} to {right.stop} on "
        f"rank {rank}.{_length(world, rank, place)} They cut with ring.chunks, where the first numel % N "
        "chunks are one longer: cut with it, too"
    )


def _length(world: World, rank: int, place: slice) -> str:
    """The length of equal parts that this place is one of, in words."""
    lengths = (
        ("ceil(numel / N)", -(-world.numel // world.world_size)),
        ("numel // N", world.numel // world.world_size),
        ("round(numel / N)", round(world.numel / world.world_size)),
    )
    ends = lambda size: (size * (rank + 1), world.numel)
    found = [name for name, size in lengths if place.start == size * rank and place.stop in ends(size)]
    return f" Your parts have {' or '.join(found)} elements." if found else ""
