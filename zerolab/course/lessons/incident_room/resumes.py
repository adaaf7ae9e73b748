"""Lesson 09: where the job ends after a resume."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerolab.course.attempts import Attempt
from zerolab.course.lessons.incident_room.lockstep import Lockstep, Tensors, mean
from zerolab.course.lessons.incident_room.room import Case, batches


def resumed(case: Case, at_resume: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Tensors:
    """Where the ranks end after a resume at which `at_resume` makes another momentum of the saved one."""
    first = before_resume(case)
    second = Lockstep(case.resumed_on, first.flats[0], at_resume(first.momentum))
    data = [batches(case, rank) for rank in range(case.resumed_on)]
    for _ in range(case.steps):
        second.step(data, mean)
    return second.flats


def before_resume(case: Case) -> Lockstep:
    """The job at the resume: its parameters, and the whole momentum."""
    world = Lockstep(case.ranks)
    data = [batches(case, rank) for rank in range(case.ranks)]
    for _ in range(case.steps):
        world.step(data, mean)
    return world


def none_saved(outcome: Attempt, files: Sequence[Any]) -> str | None:
    """Whether a load stopped because of a rank on which `save` returned None."""
    ranks = [str(rank) for rank, file in enumerate(files) if file is None]
    if not ranks or not outcome.failure or "NoneType" not in outcome.failure:
        return None
    where = "every rank" if len(ranks) == len(files) else f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
    return (
        f"on {where} save returned None, and load reads that: {outcome.failure}. Let save return what load "
        "reads on every rank, or let load read the file of a rank that has saved"
    )
