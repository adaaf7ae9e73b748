"""Lesson 09: by which norm an update is scaled.

Clipping multiplies by max_norm / norm, so each factor tells the norm that was used. It is looked up among the
norms that can be computed in a step.
"""

from itertools import product
from math import sqrt

import torch

from zerolab.course.lessons.incident_room.lockstep import Tensors, chunk, mean
from zerolab.course.lessons.incident_room.room import Case

Norms = dict[str, torch.Tensor]
"""By name; by owner of a shard, by rank and by micro-batch, or 1 where a norm does not depend on it."""


def told(
    counts: torch.Tensor, case: Case, gradients: list[Tensors], flat: torch.Tensor, most: float | None
) -> str | None:
    """The norm by which an update is scaled, from how often each gradient counts in it, where 1 is unclipped.

    ``most``: the norm to which the gradients should be clipped, or None where they should not be clipped.
    """
    if bool((counts < 1e-9).any()):
        return None
    for (name, norm), (times, size) in product(norms(case, gradients, flat).items(), multiples(case).items()):
        length = _length(counts.double(), norm * size)
        if length is None:
            continue
        if most is not None and abs(length / most - 1) < 1e-6:
            return f"the gradient is scaled by {most:g} over {times}{name}"
        if most is None and norm.numel() > 1 and not times and abs(length - round(length, 2)) < 1e-6 * length:
            return (
                f"the gradient is scaled to a norm of {length:g} at most, as clipping does, by {name}. Its "
                "length is not the fault"
            )
    return None


def _length(counts: torch.Tensor, norms: torch.Tensor) -> float | None:
    """The length to which all are scaled that are longer, if each factor is length / norm and 1 at most."""
    norms = norms.expand_as(counts)
    lengths = (counts * norms)[(counts - 1).abs() > 1e-6]
    if not len(lengths):
        return None
    length = float(lengths[0])
    predicted = (length / norms).clamp(max=1)
    never_longer = torch.allclose(counts, predicted, rtol=1e-6, atol=0)
    return length if never_longer or torch.allclose(counts, length / norms, rtol=1e-6, atol=0) else None


def multiples(case: Case) -> dict[str, float]:
    n, m = case.ranks, case.micro_batches
    by = {"": 1.0, "N times ": n, "an N-th of ": 1 / n, "the root of N times ": sqrt(n)}
    if m > 1:
        by |= {"M times ": m, "an M-th of ": 1 / m, "N·M times ": n * m, "an N·M-th of ": 1 / (n * m)}
    return by


def norms(case: Case, gradients: list[Tensors], flat: torch.Tensor) -> Norms:
    """All norms, those of the whole mean gradient and of its shards first."""
    whole = mean(gradients)
    cuts = [chunk(owner, case.ranks) for owner in range(case.ranks)]
    shards = torch.stack([whole[cut].norm() for cut in cuts])
    table = torch.stack([torch.stack(own) for own in gradients])  # rank, micro-batch, element
    means, own = table.mean(dim=0), table.mean(dim=1)
    by_owner = lambda values: values.view(-1, 1, 1)
    return {
        "the norm of the whole mean gradient": by_owner(whole.norm()),
        "the norm of its own shard": by_owner(shards),
        "the sum of the shards' norms": by_owner(shards.sum()),
        "the largest norm of a shard": by_owner(shards.max()),
        "the smallest norm of a shard": by_owner(shards.min()),
        "the mean of the shards' norms": by_owner(shards.mean()),
        "the root of the mean of the shards' squared norms": by_owner(shards.square().mean().sqrt()),
        "the square of the norm, without the root": by_owner(whole.square().sum()),
        "the square of its own shard's norm": by_owner(shards.square()),
        "the root of the norm": by_owner(whole.norm().sqrt()),
        "the sum of the absolute values": by_owner(whole.abs().sum()),
        "the sum of the absolute values of its own shard": by_owner(
            torch.stack([whole[cut].abs().sum() for cut in cuts])
        ),
        "the largest absolute value": by_owner(whole.abs().max()),
        "the largest absolute value of its own shard": by_owner(
            torch.stack([whole[cut].abs().max() for cut in cuts])
        ),
        "the mean absolute value": by_owner(whole.abs().mean()),
        "the norm of each micro-batch's mean gradient by itself: clip the mean of all micro-batches, once": (
            means.norm(dim=1).view(1, 1, -1)
        ),
        "the norm of its own shard of each micro-batch's gradient": (
            torch.stack([means[:, cut].norm(dim=1) for cut in cuts]).unsqueeze(1)
        ),
        "the norm of each rank's own gradient, before they are averaged": own.norm(dim=1).view(1, -1, 1),
        "the norm of each rank's and micro-batch's gradient, before they are averaged": (
            table.norm(dim=2).unsqueeze(0)
        ),
        "the norm of the owner's own gradient": by_owner(own.norm(dim=1)),
        "the norm of the parameters": by_owner(flat.norm()),
        "the norm of its own shard of the parameters": by_owner(
            torch.stack([flat[cut].norm() for cut in cuts])
        ),
    }
