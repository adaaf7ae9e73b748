"""Lesson 03's exercise: average gradients over ranks, graded on values, gaps, layout and messages."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from zerolab.course.attempts import Attempt, attempt
from zerolab.course.evidence import Finding, examine, first_wrong
from zerolab.course.exercise import graded
from zerolab.course.lessons.data_parallel import gaps, means, unpacked
from zerolab.course.lessons.data_parallel.cases import (
    CASES,
    SHAPES,
    SIZES,
    Case,
    flat,
    gradient,
    parameter,
    weighted,
)
from zerolab.course.lessons.data_parallel.outcomes import left_out, stopped, too_much_sent
from zerolab.course.lessons.data_parallel.solution import average_gradients

HINTS = (
    "multiply each gradient by this rank's count, add up over the ranks, and divide by the sum of the "
    "counts.",
    "give a parameter without a gradient one of zeros: parameter.grad = torch.zeros_like(parameter). Then "
    "torch.cat the flattened gradients, and the count after them, into one tensor: one dist.all_reduce sums "
    "everything.",
    "split the summed tensor at the parameters' sizes, divide each piece by the summed count (the last "
    "element), and copy it back: parameter.grad.copy_(piece.view_as(parameter)).",
)


@graded(
    "Your averaging is right on 1 to 4 ranks: unequal token counts, missing gradients, a transposed one, and "
    "one message for all.",
    call="average_gradients(parameters, count)",
    hints=HINTS,
    solution=[average_gradients],
)
def check_average_gradients(fn: Callable) -> str | None:
    """Run fn(parameters, count) on 1 to 4 ranks and print the mistake it makes, or that it makes none.

    fn leaves in every `parameter.grad` the gradient of the mean over all ranks' tokens, in one message.
    """
    return examine(CASES, partial(_look, fn))


class Averaged(NamedTuple):
    """What one rank ended with: the gradients, and their addresses by the parameter's name."""

    grads: list[torch.Tensor | None]
    parameters_changed: bool
    places: dict[str, int]


def _average(fn: Callable, case: Case, rank: int) -> Averaged:
    """In the worker: the gradients of `case` after fn has averaged them."""
    values = [parameter(name, rank, case.dtype) for name in SHAPES]
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    for name, own in zip(SHAPES, parameters, strict=True):
        own.grad = None if case.lacks(name, rank) else gradient(name, rank, case.dtype)
    if case.transposed == rank:
        parameters[0].grad = gradient("weight", rank, case.dtype).t().contiguous().t()
    fn(list(parameters), case.counts[rank])
    changed = any(not torch.equal(p, value) for p, value in zip(parameters, values, strict=True))
    grads = [None if p.grad is None else p.grad.detach().clone() for p in parameters]
    named = zip(SHAPES, parameters, strict=True)
    places = {name: own.grad.data_ptr() for name, own in named if own.grad is not None}
    return Averaged(grads, changed, places)


def _look(fn: Callable, case: Case) -> Finding:
    size = len(case.counts)
    outcome = attempt(_average, [(fn, case, rank) for rank in range(size)])
    if why := stopped(outcome, case) or left_out(outcome):
        return Finding(case.meaning, why)
    brought = case.brought()
    seen = [flat(value.grads) for value in outcome.values]
    right = [weighted(brought, case.counts) / sum(case.counts)] * size
    finding = Finding(
        case.meaning,
        None,
        seen,
        right,
        dict(means.mistakes(case)),
        partial(_parts, case),
        whole=right[0],
        cost=too_much_sent(outcome, case),
        also=outcome.hint_of_calls,
        cause=_cause(case),
    )
    if not finding.wrong:
        return finding
    finding.told = gaps.named(case, seen) or (None if finding.fitting() else _told(case, outcome, seen))
    if finding.told:
        finding.mistakes = {}
        return finding
    if finding.fitting():
        return finding
    return first_wrong((_of_parameter(finding, index, name) for index, name in enumerate(SHAPES)), finding)


def _told(case: Case, outcome: Attempt, seen: list[torch.Tensor]) -> str | None:
    """Which averages are where, if no weights and no divisors explain them."""
    right = weighted(case.brought(), case.counts) / sum(case.counts)
    return (
        unpacked.shared([value.places for value in outcome.values])
        or unpacked.states(case, seen)
        or unpacked.one_place_off(seen, right)
        or unpacked.orders(case, seen)
        or unpacked.begins(case, seen)
    )


def _parts(case: Case, rank: int) -> list[dict[str, torch.Tensor]]:
    """What an average may be a sum of: the ranks' gradients, or also their parameters' values."""
    gradients = {f"rank {peer}'s gradient": each for peer, each in enumerate(case.brought())}
    values = {
        f"rank {peer}'s parameter": flat(parameter(name, peer, case.dtype) for name in SHAPES)
        for peer in range(len(case.counts))
    }
    return [gradients, gradients | values]


def _of_parameter(finding: Finding, index: int, name: str) -> Finding:
    """The same for one parameter alone, in its shape."""
    own = lambda value: value.split(SIZES)[index].view(SHAPES[name])
    parts = lambda rank: [{who: own(part) for who, part in each.items()} for each in finding.parts(rank)]
    return finding.part(f"the {name}", own, parts)


def _cause(case: Case) -> str | None:
    """What this case has that the ones before did not have, all of which were right."""
    if case.gap is not None:
        return (
            f"without a missing gradient all averages are right. Here rank {case.gap} has none for the "
            f"{' and the '.join(case.missing)}: send zeros in its place, and put the average there"
        )
    if case.transposed is not None:
        return (
            "without a transposed gradient all averages are right. flatten() and reshape(-1) follow the "
            "elements of such a gradient, and parameter.grad.copy_(piece.view_as(parameter)) does, too"
        )
    return None
