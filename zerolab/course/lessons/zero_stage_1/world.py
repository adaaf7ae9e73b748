"""Lesson 04's exercise: its training in one process, and the results of common mistakes."""

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch

from zerolab import ring
from zerolab.course.evidence import sum_of

STEPS, LR = 3, 0.05
Gradients = list[torch.Tensor]


class World(NamedTuple):
    """The number of ranks, the length of the flat buffer, and the optimizer to shard."""

    world_size: int
    numel: int
    optimizer_class: Callable[..., torch.optim.Optimizer]

    @property
    def start(self) -> torch.Tensor:
        """The parameters that every rank begins with."""
        return torch.linspace(-1, 1, self.numel)

    def gradient(self, step: int, rank: int) -> torch.Tensor:
        """Return a rank's gradient: different for every rank and step, and no mean is near zero."""
        generator = torch.Generator().manual_seed(10 * step + rank)
        return torch.rand(self.numel, generator=generator) + 0.5 * (rank + 1)

    def trained(
        self,
        combine: Callable[[Gradients], torch.Tensor],
        fresh=False,
        pile=False,
        steps=STEPS,
        lr=LR,
        times=1,
    ) -> torch.Tensor:
        """Where one process ends if each step's gradient is what `combine` makes of the ranks' gradients.

        `fresh`: with a new optimizer at each step; `pile`: with gradients that are never cleared; `times`:
        how often each step is taken.
        """
        flat = self.start
        optimizer = self.optimizer_class([flat], lr=lr)
        gradients = [combine([self.gradient(s, r) for r in range(self.world_size)]) for s in range(steps)]
        for gradient in accumulate(gradients) if pile else gradients:
            if fresh:
                optimizer = self.optimizer_class([flat], lr=lr)
            flat.grad = gradient
            for _ in range(times):
                optimizer.step()
        return flat.detach()

    def cut(self, rank: int) -> slice:
        """Return the chunk of a rank, counted around the ring."""
        return ring.chunks(self.numel, self.world_size)[rank % self.world_size]

    def patched(self, base: torch.Tensor, patch: torch.Tensor, rank: int) -> torch.Tensor:
        """`base`, with the chunk of one rank taken from `patch`."""
        patched = base.clone()
        patched[self.cut(rank)] = patch[self.cut(rank)]
        return patched


def mean(gradients: Gradients) -> torch.Tensor:
    return sum_of(gradients) / len(gradients)


def of(rank: int) -> Callable[[Gradients], torch.Tensor]:
    """Return one rank's gradient alone."""
    return lambda gradients: gradients[rank]


def whole(world: World, each: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Return a flat buffer whose chunks come from the buffers that `each` makes for their owners."""
    return torch.cat([each(rank)[world.cut(rank)] for rank in range(world.world_size)])


def gathered_otherwise(
    world: World,
    gather: Callable[[Gradients], torch.Tensor],
    combine: Callable[[Gradients], torch.Tensor] = mean,
) -> torch.Tensor:
    """Where all ranks end if something else than an all-gather makes one flat of theirs, after each update.

    Each rank has updated its own shard alone. `gather` gets the flats of all ranks; `combine` the gradients.
    """
    flat = world.start
    shards = [flat[world.cut(rank)].clone() for rank in range(world.world_size)]
    optimizers = [world.optimizer_class([shard], lr=LR) for shard in shards]
    for step in range(STEPS):
        gradient = combine([world.gradient(step, rank) for rank in range(world.world_size)])
        flats = []
        for rank, (shard, optimizer) in enumerate(zip(shards, optimizers, strict=True)):
            shard.copy_(flat[world.cut(rank)])
            shard.grad = gradient[world.cut(rank)]
            optimizer.step()
            flats.append(flat.clone())
            flats[-1][world.cut(rank)] = shard
        flat = gather(flats)
    return flat


def divided(world: World, flats: Gradients) -> torch.Tensor:
    """Return the shards of all ranks, each divided by their number."""
    return whole(world, lambda owner: flats[owner] / world.world_size)


# A sentence, and the flat buffer that rank r ends with in a world.
# fmt: off
Mistake = Callable[[World, int], torch.Tensor]
MISTAKES: dict[str, Mistake] = {
    "step left flat as it was: let your shard be a view, flat[...], or copy the updated shard back into it. "
    "Assigning a new tensor to a name does not change flat":
        lambda w, r: w.start,
    "each rank updated its own shard, and `flat` never got the others': all-gather flat itself after the "
    "update, not a copy of it, or every rank continues with another model":
        lambda w, r: w.patched(w.start, w.trained(mean), r),
    "each rank updated its shard with its own gradient alone, and nobody got the others': reduce-scatter "
    "first, all-gather last":
        lambda w, r: w.patched(w.start, w.trained(of(r)), r),
    "each rank updated its shard with its own gradient alone: reduce-scatter first, which adds the other "
    "ranks' gradients":
        lambda w, r: whole(w, lambda owner: w.trained(of(owner))),
    "each rank updated everything with its own gradient alone: reduce-scatter first, which adds the other "
    "ranks'":
        lambda w, r: w.trained(of(r)),
    "every rank used rank 0's gradient: a broadcast copies, and a reduce-scatter adds":
        lambda w, r: w.trained(of(0)),
    "that is the sum of the gradients and not the mean: divide by the number of ranks. (Adam would hide this "
    "mistake, because its step does not depend on the gradient's scale; SGD shows it)":
        lambda w, r: w.trained(sum_of),
    "the sum was divided by 2, whatever the number of ranks: divide by the number of ranks":
        lambda w, r: w.trained(lambda g: sum_of(g) / 2),
    "the sum was divided by the number of ranks minus 1: divide by the number of ranks":
        lambda w, r: w.trained(lambda g: sum_of(g) / max(len(g) - 1, 1)),
    "the sum was divided by the number of ranks plus 1: divide by the number of ranks":
        lambda w, r: w.trained(lambda g: sum_of(g) / (len(g) + 1)),
    "the gradient has the opposite sign: the optimizer subtracts it by itself":
        lambda w, r: w.trained(lambda g: -mean(g)),
    "the gradient was divided by the number of ranks twice: once is enough":
        lambda w, r: w.trained(lambda g: mean(g) / len(g)),
    "the optimizer forgets m and v at every step: build it once, in __init__":
        lambda w, r: w.trained(mean, fresh=True),
    "the gradients pile up from step to step: assign shard.grad instead of adding to it, or clear it":
        lambda w, r: w.trained(mean, pile=True),
    "the weights were averaged instead of the gradients, each rank with an optimizer of its own: average "
    "first, then update":
        lambda w, r: mean([w.trained(of(rank)) for rank in range(w.world_size)]),
    "flat was averaged over the ranks after the update, but each rank has updated its own shard only: "
    "all-gather the shards instead":
        lambda w, r: gathered_otherwise(w, mean),
    "flat was summed over the ranks after the update, so every element counts N times: an all-reduce adds, "
    "and here the shards have to be gathered":
        lambda w, r: gathered_otherwise(w, sum_of),
    "the updated parameters were divided by N: divide the gradient, before the update":
        lambda w, r: gathered_otherwise(w, lambda flats: divided(w, flats)),
    "the updated parameters were divided by N, and the gradient was not: divide the gradient, and before the "
    "update":
        lambda w, r: gathered_otherwise(w, lambda flats: divided(w, flats), sum_of),
    "each rank's flat is zeros outside its own shard: all-gather the shards of all ranks":
        lambda w, r: w.patched(torch.zeros_like(w.start), w.trained(mean), r),
    "the gradient was divided by the number of elements, not of ranks":
        lambda w, r: w.trained(lambda g: sum_of(g) / w.numel),
    "the gradient was multiplied by the number of ranks: a reduce-scatter adds up, so divide":
        lambda w, r: w.trained(lambda g: sum_of(g) * len(g)),
    "the last step is missing: is the gradient of the step before used, or flat gathered before the update?":
        lambda w, r: w.trained(mean, steps=STEPS - 1),
    "the others' shards are one step behind: all-gather after the update, not before it":
        lambda w, r: w.patched(w.trained(mean, steps=STEPS - 1), w.trained(mean), r),
    "only the first step did anything: what keeps the later ones from it?":
        lambda w, r: w.trained(mean, steps=1),
    "each update was made twice, and once is enough":
        lambda w, r: w.trained(mean, times=2),
    "every rank has rank 0's flat, in which only rank 0's shard is new: all-gather the shards of all ranks":
        lambda w, r: w.patched(w.start, w.trained(mean), 0),
    "the gradient was divided by the length of the shard, not by the number of ranks":
        lambda w, r: w.trained(lambda g: sum_of(g) / (w.cut(r).stop - w.cut(r).start)),
    "the gradient was added to the parameters, not subtracted":
        lambda w, r: 2 * w.start - w.trained(mean),
    "the remainder is lost: the last numel % N elements never change. Cut with ring.chunks, or pad":
        lambda w, r: torch.cat([w.trained(mean)[:(n := w.numel - w.numel % w.world_size)], w.start[n:]]),
}
RATES: dict[str, Mistake] = {  # where the optimizer was built with another lr
    "the argument lr was not passed on: optimizer_class([shard], lr=lr)":
        lambda w, r: w.trained(mean, lr=1e-3),
    "the optimizer's lr was divided by the number of ranks, and the gradient was not. With SGD that is the "
    "same, and with Adam it is not, because its step does not depend on the gradient's scale: divide the "
    "gradient":
        lambda w, r: w.trained(sum_of, lr=LR / w.world_size),
    "the optimizer's lr was divided by the number of ranks: the mean of the gradients is divided already":
        lambda w, r: w.trained(mean, lr=LR / w.world_size),
    "the optimizer's lr was multiplied by the number of ranks: pass it on as it is":
        lambda w, r: w.trained(mean, lr=LR * w.world_size),
}
# fmt: on
