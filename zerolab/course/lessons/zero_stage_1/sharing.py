"""Lesson 04's exercise: what becomes of flat between the optimizer's step and the end of a training step."""

from collections.abc import Sequence

import numpy as np

from zerolab.course.evidence import same
from zerolab.course.lessons.zero_stage_1.gradients import Gradients
from zerolab.course.lessons.zero_stage_1.updates import Updated
from zerolab.course.lessons.zero_stage_1.world import STEPS, World, mean

Ends = Sequence[Sequence[np.ndarray]]  # by rank: flat at the end of each training step


def put_back(world: World, by_rank: Sequence[Updated], ends: Ends) -> str | None:
    """Whether a shard was right after the optimizer's first step, and is the old one again at the end."""
    found = _changed_again(world, by_rank, ends)
    if found is None:
        return None
    rank, own = found
    if not np.allclose(ends[rank][0][own], world.start[own].numpy(), rtol=1e-4, atol=1e-5):
        return None
    return (
        f"the optimizer changed rank {rank}'s shard of flat, and when step() returns, the old values are "
        "there again: what you do after the optimizer's step writes over them"
    )


def changed_again(world: World, by_rank: Sequence[Updated], ends: Ends) -> str | None:
    """The same, where anything else than the updated shard is there."""
    found = _changed_again(world, by_rank, ends)
    if found is None:
        return None
    return (
        f"rank {found[0]}'s shard of flat is right after the optimizer's step, and when step() returns, it "
        "has changed again: only the all-gather has to follow the optimizer's step"
    )


def _changed_again(world: World, by_rank: Sequence[Updated], ends: Ends) -> tuple[int, slice] | None:
    """The first rank whose shard was right after the optimizer's first step, and not at the end."""
    want = world.trained(mean, steps=1).numpy()
    close = lambda got, own: np.allclose(got[own], want[own], rtol=1e-4, atol=1e-5)
    for rank, each in enumerate(by_rank):
        own, first = world.cut(rank), each.of(0)
        if not first or first[-1].place != own or own.start == own.stop:
            continue
        if close(first[-1].after, own) and not close(ends[rank][0], own):
            return rank, own
    return None


def averaged(world: World, gradients: Gradients, by_rank: Sequence[Updated], ends: Ends) -> str | None:
    """Whether each rank stepped on its own gradient, and flat then became the mean of the ranks' flats."""
    for rank, own in enumerate(gradients):
        if not same(own[0], world.gradient(0, rank)[world.cut(rank)]):
            return None
    after = np.mean([each.of(0)[0].after for each in by_rank], axis=0)
    if not all(np.allclose(own[0], after, rtol=1e-4, atol=1e-5) for own in ends):
        return None
    return (
        "the weights were averaged instead of the gradients: each rank's optimizer stepped on this rank's "
        "own gradient, and flat was averaged over the ranks afterwards. Reduce-scatter the gradient before "
        "the step, and all-gather flat after it"
    )


def between(world: World, ends: Ends) -> str | None:
    """Whether flat is right at the end of training, and not after an earlier step."""
    for step in range(STEPS - 1):
        want = world.trained(mean, steps=step + 1).numpy()
        for rank, own in enumerate(ends):
            if not np.allclose(own[step], want, rtol=1e-4, atol=1e-5):
                return (
                    f"after training step {step}, counted from 0, rank {rank}'s flat is not what one process "
                    "has, though it is right at the end: gather the shards in every step"
                )
    return None
