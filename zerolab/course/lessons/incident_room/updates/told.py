"""Lesson 09: what wrong parameters tell where no known mistake explains them.

The first step that is wrong is looked at: the parameters that backward ran with, the owners' updates of their
shards, and what the ranks have of each other's shards.
"""

from collections.abc import Callable, Sequence

import torch

from zerolab.course.lessons.incident_room.lockstep import Tensors
from zerolab.course.lessons.incident_room.room import PSI, Case, start
from zerolab.course.lessons.incident_room.runs import Seen
from zerolab.course.lessons.incident_room.updates import counted, first, moved, second
from zerolab.course.lessons.incident_room.updates.steps import Step, close, first_wrong, wrong_elements


def updates_told(
    case: Case, ended: Sequence[Seen], right: Callable[[Case], Tensors], most: float | None
) -> str | None:
    """What the first two updates tell. ``most``: the norm that gradients are clipped to, if they are."""
    flats = [flat for each in ended for flat in each.after]
    if any(flat.shape != start().shape or not flat.isfinite().all() for flat in flats):
        return None
    if other := _other_optimizer(ended):
        return other
    step = first_wrong(case, ended, right)
    if step is None:
        return _later(case, ended, right)
    begin = "the first step is right, and " * step.number
    return begin + _of_step(step, most)


def _of_step(step: Step, most: float | None) -> str:
    if told := _nothing_changed(step) or _backward(step):
        return told
    by_name = step.case.by_name and not step.case.tied
    for layout in {False, by_name}:
        if told := moved.gathered(step, layout):
            return told
    if told := moved.added_up(step):
        return told
    return "in the second step " * step.number + (second if step.number else first).told(step, by_name, most)


def _nothing_changed(step: Step) -> str | None:
    """Whether the first step left all parameters as they were, and what the momentum tells of it."""
    if step.number or any(not torch.equal(flat, step.before) for flat in step.after):
        return None
    said = "step left the parameters as they were"
    momenta = [shard for each in step.ended for shard in each.momentum if shard is not None]
    if not momenta:
        return f"{said}, and no optimizer has a momentum: none has taken a step with a gradient"
    if not any(shard.any() for shard in momenta):
        return (
            f"{said}, and the optimizers' momentum is 0: they took their steps with gradients of 0. Is the "
            "sum of the gradients cleared before it is used, or are they multiplied by 0, as by a // b "
            "with a smaller a?"
        )
    return (
        f"{said}, and the optimizers have a momentum: an update was made, and it never reached them. Is what "
        "the optimizer updates a copy, and no view?"
    )


def _backward(step: Step) -> str | None:
    """Whether a backward runs too often, or never, or with other parameters than those of before the step."""
    for rank, each in enumerate(step.ended):
        if irregular := [micro for micro, times in enumerate(each.backwards) if times != step.case.steps]:
            often = each.backwards[irregular[0]]
            which = counted.named("micro-batch", irregular, verb=False)
            runs = f"runs {often} times in {step.case.steps} steps" if often else "never runs"
            return f"on rank {rank} the backward of {which} {runs}: run each of them once in each step"
        for micro, used in enumerate(each.used):
            flat = used[step.number][:PSI]
            if len(flat) == PSI and not close(flat, step.before):
                of = f" with micro-batch {micro}" * (step.case.micro_batches > 1)
                return f"rank {rank}'s backward{of} runs with wrong parameters: {_used(step, flat, micro)}"
    return None


def _used(step: Step, flat: torch.Tensor, micro: int) -> str:
    """What parameters are that a backward ran with, and should not have."""
    wrong = wrong_elements(flat, step.before)
    which = moved.span(wrong.tolist(), step.case)
    if not flat[wrong].any():
        return f"{which} are 0, and were not gathered"
    if step.number and close(flat[wrong], start()[wrong]):
        return f"{which} are those of before the first update: gather again after each update"
    if micro:
        return f"{which} have changed since the first micro-batch. Update once, after the last micro-batch"
    return f"{which} are not those that the step began with"


def _other_optimizer(ended: Sequence[Seen]) -> str | None:
    """Whether an optimizer has other settings than the ticket's, but for the learning rate."""
    for rank, each in enumerate(ended):
        if each.settings:
            return f"rank {rank}'s optimizer has {each.settings[0]}, and the ticket's has not"
    return None


def _later(case: Case, ended: Sequence[Seen], right: Callable[[Case], Tensors]) -> str:
    """What can be said where the first two updates are right up to a small difference."""
    want = right(case)
    off = max(float(((each.flat - flat) / flat).abs().max()) for each, flat in zip(ended, want, strict=True))
    if off < 1e-4:
        return (
            f"the parameters are right up to a relative difference of {off:.1g} after {case.steps} steps: is "
            "a small number added somewhere, or does something go through float32?"
        )
    return "the first two steps are right, and a later one is not: what is left over from step to step?"
