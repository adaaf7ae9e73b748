"""Lesson 09: what a wrong second update tells, where the first one is right: what the first step leaves over.

It should be momentum times the first update, and its own gradients.
"""

import torch

from zerolab.course.lessons.incident_room.engine import MOMENTUM
from zerolab.course.lessons.incident_room.room import LR, PSI
from zerolab.course.lessons.incident_room.updates import counted, first
from zerolab.course.lessons.incident_room.updates.counted import factor, names
from zerolab.course.lessons.incident_room.updates.steps import (
    Piece,
    Step,
    close,
    counts_of_both,
    pieces,
    wrong_elements,
)

_NO_MOMENTUM = (
    "the update has no momentum. The optimizer keeps the momentum in its state: keep one optimizer and its "
    "state for all steps, and clear only the gradients"
)


def told(step: Step, by_name: bool, most: float | None) -> str:
    """What it is. ``most``: the norm that gradients are clipped to, if they are."""
    if rate := _changed_rate(step):
        return rate
    wrong = [piece for piece in pieces(step.case, by_name) if step.wrong(piece)]
    if not wrong:
        return "what the ranks have of each other's shards is wrong"
    where = _where(step, wrong)
    got, gradient = (torch.cat(each) for each in zip(*(_wrong(step, p) for p in wrong), strict=True))
    if close(got, torch.zeros_like(got)):
        return f"{where}nothing changes: nothing is updated, or nothing gathered, any more"
    if close(got, gradient):
        return f"{where}{_NO_MOMENTUM}"
    tables = [counts_of_both(step, piece) for piece in wrong]
    if any(table is None for table in tables):
        return (
            f"{where}the update is no sum of the first step's gradients and of its own: what does the first "
            "step change that the second one uses?"
        )
    table = torch.stack([each for each in tables if each is not None])
    return where + _of_counts(table[:, 0], table[:, 1], step, most)


def _changed_rate(step: Step) -> str | None:
    """Whether an optimizer has another learning rate after the last step. The first step was right."""
    for rank, each in enumerate(step.ended):
        for rate in each.rates:
            if abs(rate / LR - 1) > 1e-9:
                return (
                    f"rank {rank}'s optimizer has another learning rate: it changes from step to step, and "
                    f"is {rate:.3g} after the last one. The engine was given {LR:g}. Repair the gradient, "
                    "and leave the rate as it is"
                )
    return None


def _wrong(step: Step, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the elements that are wrong: the update, and what the second step's gradient alone makes."""
    got, right = step.got(piece), step.right(piece)
    at = wrong_elements(got, right)
    return got[at], (right - MOMENTUM * step.update_before[piece.cut])[at]


def _where(step: Step, wrong: list[Piece]) -> str:
    """Which elements are wrong, where not all are."""
    elements = torch.cat([torch.arange(PSI)[piece.cut] for piece in wrong])
    off = [wrong_elements(step.got(piece), step.right(piece)) for piece in wrong]
    if len(elements) == PSI and sum(map(len, off)) > PSI / 2:
        return ""
    each = torch.cat([torch.arange(PSI)[piece.cut][own] for piece, own in zip(wrong, off, strict=True)])
    first, last = int(each.min()), int(each.max())
    many = f"elements {first} to {last} are" if last > first else f"element {first} is"
    return f"{many} wrong: "


def _of_counts(kept: torch.Tensor, new: torch.Tensor, step: Step, most: float | None) -> str:
    """How often the first step's gradients count (1: with the momentum alone), and the second's."""
    ones = torch.ones_like(new)
    alike = [bool((each - each.flatten()[0]).abs().max() < 1e-4) for each in (kept, new)]
    if all(alike):
        return _of_factors(MOMENTUM * _rounded(kept), _rounded(new), step)
    if not torch.allclose(new, ones, atol=1e-4):
        return first.in_words(new, step, most) or _UNEVEN
    left = MOMENTUM * (kept - ones)
    return _left_over(left, step)


def _rounded(counts: torch.Tensor) -> float:
    count = round(float(counts.flatten()[0]), 5)
    return 0.0 if abs(count) < 1e-3 else count


_UNEVEN = "its gradients do not count alike: what does the first step change that the second one uses?"


def _left_over(left: torch.Tensor, step: Step) -> str:
    """Which of the first step's gradients are in the sum still."""
    by_micro = left.mean(dim=(0, 1))
    if torch.allclose(left, by_micro.expand_as(left), atol=1e-4):
        there = [number for number, count in enumerate(by_micro.tolist()) if abs(count) > 1e-4]
        which = counted.named("micro-batch", there)
        return (
            f"the first step's {which} still in the sum, {factor(float(by_micro[there[0]]), step.case)}: "
            "clear all of the sum after the update"
        )
    return "a part of the first step's gradients is still in the sum: clear all of it after the update"


def _of_factors(kept: float, new: float, step: Step) -> str:
    """How often the first step's gradient and the second's count in the second update."""
    counts = f"the first step's gradient counts {kept:.3g} times"
    left = kept - MOMENTUM
    if new == 0:
        if abs(left) < 1e-4:
            return "there is the momentum of the first step alone: the second step's gradient is lost"
        return f"there is nothing of the second step's gradient, and the first step's counts {kept:.3g} times"
    if abs(left) < 1e-4:
        return (
            f"the gradient counts {new:.3g} times what it should: what it is divided by, or "
            "multiplied with, is left over from step to step"
        )
    if new == 1:
        return f"{counts}, and its momentum makes that {MOMENTUM:g}: {_what_is_left(left, step)}"
    said = (
        f"{counts}, where momentum makes that {MOMENTUM:g}, and its own counts {new:.3g} times, where 1 is "
        "right"
    )
    if abs(left - new) < 1e-3:
        return (
            f"{said}. That is {new:.3g} times the sum of both steps' gradients: the sum is not cleared, and "
            "what it is divided by grows, too. Clear the sum after each update"
        )
    return said


def _what_is_left(left: float, step: Step) -> str:
    if left < 0:
        return "what takes away a part of the first step?"
    found = names(1 / left, step.case)
    divided = f", divided by {' or '.join(found)} once more," if found else ""
    return (
        f"{left:.3g} of it{divided} is left over in what the second step adds to. Clear that after the "
        "update: shard.grad, or the sum that you keep"
    )
