"""Where the job ends, done rightly and with each known mistake: all ranks in one process, in lockstep."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from zerolab import ring
from zerolab.course.evidence import sum_of
from zerolab.course.lessons.incident_room.engine import MOMENTUM
from zerolab.course.lessons.incident_room.room import LR, PSI, RANKS, Batch, Case, batches, one_thread, start

Tensors = list[torch.Tensor]
Gradients = list[Tensors]  # by rank and micro-batch
Combine = Callable[[Gradients, int], torch.Tensor]
"""What the owner of a shard takes for the gradient, as a whole buffer of which its chunk counts."""
Gather = Callable[["Lockstep", Tensors], None]
"""What becomes of the owners' new shards."""


def mean(gradients: Gradients, owner: int = 0) -> torch.Tensor:
    return summed(gradients) / sum(map(len, gradients))


def summed(gradients: Gradients, owner: int = 0) -> torch.Tensor:
    return sum_of(gradient for own in gradients for gradient in own)


def own(gradients: Gradients, owner: int) -> torch.Tensor:
    """The owner's own gradients alone."""
    return sum_of(gradients[owner]) / len(gradients[owner])


def last(gradients: Gradients, owner: int) -> torch.Tensor:
    """The last micro-batch alone, divided as if it were all of them."""
    return sum_of(own[-1] for own in gradients) / sum(map(len, gradients))


def times(factor: float) -> Combine:
    """A multiple of the mean."""
    return lambda gradients, owner: factor * mean(gradients)


def chunk(rank: int, world_size: int) -> slice:
    return ring.chunks(PSI, world_size)[rank]


class Lockstep:
    """The job on `world_size` simulated ranks: what each has in flat, and its momentum.

    Attributes: flats, by rank; momentum, whole; uses, what the two uses of a tied weight count.
    """

    def __init__(
        self, world_size: int, flat: torch.Tensor | None = None, momentum: torch.Tensor | None = None
    ):
        flat = start() if flat is None else flat
        self.uses = (1.0, 1.0)
        self.world_size = world_size
        self.flats = [flat.clone() for _ in range(world_size)]
        self.momentum = torch.zeros_like(flat) if momentum is None else momentum.clone()

    def step(self, data: Sequence[Sequence[Batch]], combine: Combine, gather: Gather | None = None) -> None:
        """One step: gradients, what `combine` makes of them, the update, and the gather."""
        gradients = [
            [self.gradient(batch, flat) for batch in own] for flat, own in zip(self.flats, data, strict=True)
        ]
        self.update(gradients, combine, gather)

    def update(self, gradients: Gradients, combine: Combine, gather: Gather | None = None) -> None:
        """Update each shard with what `combine` makes of the gradients, and gather."""
        updated = []
        for owner in range(self.world_size):
            mine = chunk(owner, self.world_size)
            self.momentum[mine] = MOMENTUM * self.momentum[mine] + combine(gradients, owner)[mine]
            updated.append(self.flats[owner][mine] - LR * self.momentum[mine])
        (gather or Lockstep.gather)(self, updated)

    def gradient(self, batch: Batch, flat: torch.Tensor) -> torch.Tensor:
        """The gradient of a batch. A tied weight is used twice, and its gradients are added."""
        used = batch.inputs.shape[1] - PSI
        whole = batch.gradient(torch.cat([flat, flat[PSI - used :]]))
        gradient = whole[:PSI].clone()
        if used:
            first, second = self.uses
            gradient[PSI - used :] = first * whole[PSI - used : PSI] + second * whole[PSI:]
        return gradient

    def gather(self, updated: Tensors) -> None:
        """Every rank gets every shard."""
        whole = torch.cat(updated)
        self.flats = [whole.clone() for _ in self.flats]

    def keep_apart(self, updated: Tensors) -> None:
        """Every rank has its own new shard, and the others' as they were."""
        for rank, shard in enumerate(updated):
            self.flats[rank][chunk(rank, self.world_size)] = shard

    def from_rank_0(self, updated: Tensors) -> None:
        """Every rank gets rank 0's parameters, in which its own shard alone is new."""
        self.keep_apart(updated)
        self.flats = [self.flats[0].clone() for _ in self.flats]

    def to_rank_0(self, updated: Tensors) -> None:
        """Rank 0 gets every shard, and each other rank has its own new one alone."""
        self.keep_apart(updated)
        self.flats[0] = torch.cat(updated)

    def average(self, updated: Tensors) -> None:
        """Every rank gets the mean of all ranks' parameters, in each of which one shard alone is new."""
        self.keep_apart(updated)
        mean_flat = sum_of(self.flats) / self.world_size
        self.flats = [mean_flat.clone() for _ in self.flats]

    def gather_first(self, updated: Tensors) -> None:
        """Every rank gets every shard as it was before the update, and has its own new one."""
        self.gather([flat[chunk(rank, self.world_size)] for rank, flat in enumerate(self.flats)])
        self.keep_apart(updated)


def trained(
    case: Case,
    combine: Combine = mean,
    steps: int | None = None,
    gather: Gather | None = None,
    uses: tuple[float, float] = (1.0, 1.0),
) -> Tensors:
    """Where the ranks end if the gradient is what `combine` makes of it."""
    world = Lockstep(case.ranks)
    world.uses = uses
    data = [batches(case, rank) for rank in range(case.ranks)]
    for _ in range(case.steps if steps is None else steps):
        world.step(data, combine, gather)
    return world.flats


def each_updates(case: Case, factor: float = 1.0, gathers: bool = True) -> Tensors:
    """Where the ranks end if each micro-batch has an update; not `gathers`: the last alone has a gather."""
    world = Lockstep(case.ranks)
    data = [batches(case, rank) for rank in range(case.ranks)]
    for _ in range(case.steps):
        for micro in range(case.micro_batches):
            last = micro == case.micro_batches - 1
            gather = None if gathers or last else Lockstep.keep_apart
            world.step([[own[micro]] for own in data], times(factor), gather)
    return world.flats


def each_updates_unseen(case: Case, factor: float = 1.0) -> Tensors:
    """The same where all micro-batches of a step run with the parameters of before the first update."""
    world = Lockstep(case.ranks)
    data = [batches(case, rank) for rank in range(case.ranks)]
    for _ in range(case.steps):
        seen = world.flats[0]
        for micro in range(case.micro_batches):
            world.update([[world.gradient(own[micro], seen)] for own in data], times(factor))
    return world.flats


def untouched(case: Case) -> Tensors:
    """Where the ranks begin."""
    return trained(case, steps=0)


def piled(case: Case, combine: Combine = mean) -> Tensors:
    """Where the ranks end if the gradients of earlier steps are never cleared."""
    before: Tensors = []

    def pile(gradients: Gradients, owner: int) -> torch.Tensor:
        if owner == 0:
            before.append(combine(gradients, owner))
        return list(accumulate(before, torch.add))[-1]

    return trained(case, pile)


def behind(case: Case, combine: Combine = mean) -> Tensors:
    """Where the ranks end if each update uses the gradient of the step before, and the first one zeros."""
    before: Tensors = []

    def late(gradients: Gradients, owner: int) -> torch.Tensor:
        if owner == 0:
            before.append(combine(gradients, owner))
        return before[-2] if len(before) > 1 else torch.zeros(PSI, dtype=torch.float64)

    return trained(case, late)


def lagging(case: Case) -> Tensors:
    """Where the ranks end if all is right, but each has the others' shards of the step before."""
    world = Lockstep(case.ranks)
    data = [batches(case, rank) for rank in range(case.ranks)]
    for step in range(case.steps):
        world.step(data, mean, Lockstep.keep_apart if step == case.steps - 1 else None)
    return world.flats


def alone(steps: int = 40, **case: Any) -> tuple[list[float], torch.Tensor]:
    """The loss of each step in one process, and where it ends, with a resume if the case has one."""
    asked = Case(RANKS, steps=steps, **case)
    world, losses = Lockstep(RANKS), []
    for ranks in filter(None, (RANKS, asked.resumed_on)):
        world = Lockstep(ranks, world.flats[0], world.momentum)
        data = [batches(asked, rank) for rank in range(ranks)]
        counts = [[len(batch) for batch in own] for own in data]
        with one_thread():
            for _ in range(steps):
                world.step(data, lambda gradients, owner: weighted_mean(gradients, counts))  # noqa: B023
        errors = zip(*(batch.errors for own in data for batch in own), strict=True)
        losses += [sum(step) / sum(map(sum, counts)) for step in errors]
    return losses, world.flats[0]


def weighted_mean(gradients: Gradients, counts: list[list[int]]) -> torch.Tensor:
    """The mean over all samples, of means over `counts` samples each."""
    pairs = [pair for own in zip(counts, gradients, strict=True) for pair in zip(*own, strict=True)]
    return sum_of(count * gradient for count, gradient in pairs) / sum(map(sum, counts))
