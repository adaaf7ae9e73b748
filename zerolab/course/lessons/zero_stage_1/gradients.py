"""Lesson 04's exercise: whether each step's gradient is the right one, of the right chunk and the right step.

The optimizers' own gradients are known, so this does not depend on what the optimizer makes of them, nor on
how the parameters are shared afterwards.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from zerolab.course.evidence import Finding, same
from zerolab.course.lessons.zero_stage_1.updates import Updated
from zerolab.course.lessons.zero_stage_1.world import STEPS, World, mean
from zerolab.course.reading import coefficients

Gradients = list[list[torch.Tensor]]  # by rank and training step


def given(world: World, by_rank: Sequence[Updated]) -> Gradients | None:
    """The gradients of all ranks' optimizers, if each took one step with one in each training step."""
    found: Gradients = []
    for each in by_rank:
        taken = [each.of(step) for step in range(STEPS)]
        if any(len(own) != 1 or own[0].gradient is None for own in taken):
            return None
        found.append([torch.from_numpy(own[0].gradient) for own in taken])
    lengths = [world.cut(rank).stop - world.cut(rank).start for rank in range(world.world_size)]
    return found if [len(own[0]) for own in found] == lengths else None


def _mean(world: World, step: int, rank: int, chunk: int | None = None) -> torch.Tensor:
    cut = world.cut(rank if chunk is None else chunk)
    return mean([world.gradient(step, peer) for peer in range(world.world_size)])[cut]


def wrong_step(world: World, gradients: Gradients) -> str | None:
    """Whether the gradients are those of other training steps than the one that they are used in."""
    tables = [[_of_steps(world, got, rank) for got in own] for rank, own in enumerate(gradients)]
    if any(row is None for table in tables for row in table) or any(table != tables[0] for table in tables):
        return None
    table = [row for row in tables[0] if row is not None]
    unit = lambda step: [float(each == step) for each in range(STEPS)]
    if table == [unit(step) for step in range(STEPS)]:
        return None
    if all(row == unit(0) for row in table):
        return (
            "every step uses the mean gradient of step 0: assign the new one to the shard's .grad each time"
        )
    if table == [unit(0), *(unit(step) for step in range(STEPS - 1))]:
        return "each update uses the numbers of the step before, and the first of them twice"
    if table == [[0.0] * STEPS, *(unit(step) for step in range(STEPS - 1))]:
        return "each update uses the gradient of the step before, and the first one a gradient of zeros"
    if table == [[float(each <= step) for each in range(STEPS)] for step in range(STEPS)]:
        return (
            "the gradients pile up from step to step: assign shard.grad instead of adding to it, or clear it"
        )
    if any(factor for step, row in enumerate(table) for each, factor in enumerate(row) if each != step):
        return _mixed(table)
    return None


def _of_steps(world: World, got: torch.Tensor, rank: int) -> list[float] | None:
    """How often the mean gradient of each training step is in it, if it is a sum of these."""
    found = coefficients(got, {str(step): _mean(world, step, rank) for step in range(STEPS)})
    return None if found is None else [round(factor, 3) + 0.0 for factor in found.values()]


def _mixed(table: Sequence[Sequence[float]]) -> str:
    step, row = next((step, row) for step, row in enumerate(table) if any(row[:step]) or any(row[step + 1 :]))
    terms = [f"{factor:g} × that of step {each}" for each, factor in enumerate(row) if factor]
    return (
        f"in training step {step}, counted from 0, the optimizer's gradient is {' + '.join(terms)}: it has "
        f"to be the mean gradient of step {step} alone"
    )


def wrong_chunk(world: World, gradients: Gradients) -> str | None:
    """Whether a shard gets the gradient of another chunk, complete or of some ranks only."""
    for rank, own in enumerate(gradients):
        if same(own[0], _mean(world, 0, rank)):
            continue
        for chunk in range(world.world_size):
            parts = {str(peer): world.gradient(0, peer)[world.cut(chunk)] for peer in range(world.world_size)}
            found = coefficients(own[0], parts) if chunk != rank else None
            if found is None:
                continue
            there = [peer for peer, factor in found.items() if abs(factor) > 1e-3]
            if not there:
                continue
            ranks = f"rank{'s' * (len(there) > 1)} {' and '.join(there)}"
            of = "" if len(there) == world.world_size else f", of the gradients of {ranks} only"
            return (
                f"rank {rank}'s optimizer gets the gradient of chunk {chunk}{of}, and its shard is chunk "
                f"{rank}: take what ring.reduce_scatter returns. After it the other chunks hold partial sums"
            )
    return None


def finding(world: World, gradients: Gradients, whole: Finding) -> Finding | None:
    """The first training step whose gradients are wrong, as a case of its own."""
    for step in range(STEPS):
        seen = [own[step] for own in gradients]
        wants = [_mean(world, step, rank) for rank in range(world.world_size)]
        if all(same(got, want) for got, want in zip(seen, wants, strict=True)):
            continue
        return replace(
            whole,
            where=f"{whole.where}, in the gradient of the optimizer in training step {step}",
            seen=seen,
            right=wants,
            mistakes=dict(_mistakes(world, step)),
            parts=partial(_parts, world, step),
            cause=None,
            told=_constant(seen),
            whole=None,
        )
    return None


def _constant(seen: Sequence[torch.Tensor]) -> str | None:
    """What to say of gradients that are one number in all elements. All means are positive."""
    if not all(len(got) > 1 and bool((got == got[0]).all()) for got in seen):
        return None
    number = float(seen[0][0])
    signs = ", like the sign of the mean, or the mean rounded down by //" * all(
        bool((got == 1).all()) for got in seen
    )
    return f"the optimizer's gradient is {number:.4g} in all elements{signs}: it has to be the mean itself"


def _mistakes(world: World, step: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """What a gradient may be that is no sum of the ranks' gradients."""
    ranks = range(world.world_size)
    means = [_mean(world, step, rank) for rank in ranks]
    if step == 0:
        yield (
            "the optimizer's gradient is made of flat, and not of the gradient: reduce-scatter the gradient",
            [world.start[world.cut(rank)] for rank in ranks],
        )
    yield (
        "the mean gradient was divided by its norm: leave its scale as it is",
        [each / each.norm() for each in means],
    )


def _parts(world: World, step: int, rank: int) -> list[dict[str, torch.Tensor]]:
    """What the gradient of a rank's shard may be a sum of."""
    own, peers = world.cut(rank), range(world.world_size)
    return [{f"rank {peer}'s gradient of step {step}": world.gradient(step, peer)[own] for peer in peers}]
