"""Lesson 09: mistakes that any ticket's repair may make, and where the ranks end with each."""

from collections.abc import Callable, Iterable, Mapping

import torch

from zerolab.course.lessons.incident_room.engine import MOMENTUM
from zerolab.course.lessons.incident_room.lockstep import (
    Combine,
    Gradients,
    Lockstep,
    Tensors,
    behind,
    each_updates,
    lagging,
    last,
    mean,
    own,
    piled,
    times,
    trained,
)
from zerolab.course.lessons.incident_room.room import LR, PSI, Case


def remainder_lost(case: Case) -> Tensors:
    """Where the ranks end if the last numel % N elements are no part of any shard."""
    return remainder_by(case, lambda rank: False, mean)


def remainder_by(case: Case, updates: Callable[[int], bool], combine: Combine) -> Tensors:
    """The same, but each rank that `updates` updates the remainder for itself, and nobody gathers it."""
    rest = slice(PSI - PSI % case.ranks, PSI)
    momentum = torch.zeros(case.ranks, PSI, dtype=torch.float64)
    latest: list[Gradients] = []

    def note(gradients: Gradients, owner: int) -> torch.Tensor:
        latest.append(gradients)
        return mean(gradients)

    def gather(world: Lockstep, updated: Tensors) -> None:
        before = [flat[rest].clone() for flat in world.flats]
        world.gather(updated)
        for rank, flat in enumerate(world.flats):
            momentum[rank] = MOMENTUM * momentum[rank] + combine(latest[-1], rank)
            flat[rest] = before[rank] - LR * momentum[rank][rest] * updates(rank)

    return trained(case, note, gather=gather)


# A sentence, and where the ranks end.
# fmt: off
DIVIDED_TWICE = "the gradient is divided by the number of ranks twice"
AVERAGED = (
    "the gather averages the ranks' whole parameters, and each rank has only its own shard new: gather the "
    "shards, and do not average them"
)
_COMMON: dict[str, Callable[[Case], Tensors]] = {

    "that is the sum over the ranks and not the mean: divide once by the number of ranks":
        lambda case: trained(case, times(case.ranks)),
    DIVIDED_TWICE:
        lambda case: trained(case, times(1 / case.ranks)),
    AVERAGED:
        lambda case: trained(case, gather=Lockstep.average),
    "each rank updates its shard with its own gradient alone: reduce-scatter first":
        lambda case: trained(case, own),
    "each rank updates its own shard, and no rank ever gets the others': all-gather after the update":
        lambda case: trained(case, gather=Lockstep.keep_apart),
    "each rank ends with the others' shards of the step before: gather last":
        lagging,
    "every rank ends with rank 0's parameters, in which only rank 0's shard is new: gather the shards of all":
        lambda case: trained(case, gather=Lockstep.from_rank_0),
    "rank 0 alone gets the others' new shards, and the other ranks keep the old ones: every rank needs all "
    "of them, so all-gather":
        lambda case: trained(case, gather=Lockstep.to_rank_0),
    "the gather comes before the update, so each rank trains with the others' shards of the step before":
        lambda case: trained(case, gather=Lockstep.gather_first),
    "the gradients of earlier steps are never cleared: begin each step with a new sum":
        piled,
    "each update uses the gradient of the step before":
        behind,
    "the last numel % N elements never change: the remainder is lost":
        remainder_lost,

    }
_OF_MICRO_BATCHES: dict[str, Callable[[Case], Tensors]] = {
    "only the last micro-batch counts: add them all up, and clear the sum after the step":
        lambda case: trained(case, last),
    "each micro-batch has an update of its own: add the gradients of all of them up, and update once in a "
    "step":
        each_updates,
    "each micro-batch has an update of its own, with its gradient divided by the number of micro-batches: "
    "add the gradients of all of them up, and update once in a step":
        lambda case: each_updates(case, 1 / case.micro_batches),
    "each micro-batch has an update of its own, and the gather comes after the last of them: add the "
    "gradients of all of them up, and update once in a step":
        lambda case: each_updates(case, gathers=False),
}
# fmt: on


def common(case: Case, calls: Iterable[str]) -> Mapping[str, Callable[[Case], Tensors]]:
    """The mistakes that a case can show, of those that the functions which sent something leave possible.

    With one micro-batch an update of its own is the right one.
    """
    reduced = any("all_reduce" in call for call in calls)
    gathered = any("all_gather" in call for call in calls)
    averages = reduced and not gathered
    ruled_out = {DIVIDED_TWICE: averages, AVERAGED: not reduced}
    mistakes = _COMMON | (_OF_MICRO_BATCHES if case.micro_batches > 1 else {})
    return {why: ends for why, ends in mistakes.items() if not ruled_out.get(why)}
