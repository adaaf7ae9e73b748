"""Lesson 03's exercise: average gradients over ranks, graded on values, gaps, layout and messages."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from zerolab.course.attempts import Attempt, attempt
from zerolab.course.evidence import Finding, examine, first_wrong, same
from zerolab.course.exercise import graded
from zerolab.course.lessons.data_parallel.cases import (
    CASES,
    FORMULAS,
    MISTAKES,
    PSI,
    SHAPES,
    SIZES,
    Case,
    gradient,
    weighted,
)
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
    "Your averaging is right on 1 to 4 ranks: unequal token counts, a missing gradient, a transposed "
    "one, and one message for all.",
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
    """What one rank ended with."""

    grads: list[torch.Tensor | None]
    parameters_changed: bool


def _average(fn: Callable, case: Case, rank: int) -> Averaged:
    """In the worker: the gradients of `case` after fn has averaged them."""
    values = [torch.full(shape, rank + 1.0, dtype=torch.float64) for shape in SHAPES.values()]
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    for name, parameter in zip(SHAPES, parameters, strict=True):
        parameter.grad = None if name == "gate" and case.gap == rank else gradient(name, rank)
    if case.transposed == rank:
        parameters[0].grad = gradient("weight", rank).t().contiguous().t()
    fn(parameters, case.counts[rank])
    changed = any(not torch.equal(p, value) for p, value in zip(parameters, values, strict=True))
    return Averaged([None if p.grad is None else p.grad.detach().clone() for p in parameters], changed)


def _look(fn: Callable, case: Case) -> Finding:
    size = len(case.counts)
    outcome = attempt(_average, [(fn, case, rank) for rank in range(size)])
    if stopped := _stopped(outcome, case) or _left_out(outcome):
        return Finding(case.meaning, stopped)
    brought = [
        _flat(gradient(name, rank) * (name != "gate" or rank != case.gap) for name in SHAPES)
        for rank in range(size)
    ]
    seen = [_flat(value.grads) for value in outcome.values]
    right = [weighted(brought, case.counts) / sum(case.counts)] * size
    mistakes = {why: [f(brought, case.counts, r) for r in range(size)] for why, f in MISTAKES.items()}
    mistakes |= {why: [powers.value(brought, case.counts)] * size for why, powers in FORMULAS.items()}
    if case.gap is not None:
        mistakes |= _without_the_gap(brought, case)
    finding = Finding(
        case.meaning,
        None,
        seen,
        right,
        mistakes,
        lambda rank: [{f"rank {peer}'s gradient": each for peer, each in enumerate(brought)}],
        whole=right[0],
        cost=_too_much_sent(outcome),
        also=outcome.hint_of_calls,
        cause=_cause(case) or _one_place_off(seen, right[0]),
    )
    return finding if finding.fitting() or not finding.wrong else _one_parameter(finding)


def _flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _one_parameter(finding: Finding) -> Finding:
    """The same for the first parameter that is wrong, where others are right."""
    return first_wrong((_of_parameter(finding, index, name) for index, name in enumerate(SHAPES)), finding)


def _of_parameter(finding: Finding, index: int, name: str) -> Finding:
    """The same for one parameter alone."""
    own = lambda value: value.split(SIZES)[index]
    parts = lambda rank: [{peer: own(part) for peer, part in finding.parts(rank)[0].items()}]
    return finding.part(f"the {name}", own, parts)


def _without_the_gap(brought: list[torch.Tensor], case: Case) -> dict[str, list[torch.Tensor]]:
    """The mean over those ranks only that have a gradient."""
    present = sum(count for rank, count in enumerate(case.counts) if rank != case.gap)
    mean = (weighted(brought, case.counts) / sum(case.counts)).split(SIZES)
    without = {"gate": sum(case.counts) / present}
    value = _flat(piece * without.get(name, 1) for name, piece in zip(SHAPES, mean, strict=True))
    counts = tuple(count * (rank != case.gap) for rank, count in enumerate(case.counts))
    alone = weighted(brought, counts) / present
    return {
        "the tokens of a rank without a gradient were left out of the count: its "
        "gradient is zero, and its tokens count": [value] * len(brought),
        "a rank that lacks one gradient was left out for all parameters: its other gradients and its tokens "
        "count": [alone] * len(brought),
    }


def _one_place_off(seen: list[torch.Tensor], right: torch.Tensor) -> str | None:
    """Whether each element is, times some factor, the one beside it; and whether the count is at the end."""
    but_first, but_last = slice(1, None), slice(None, -1)
    for side, own, others, end, place in (
        ("before", but_first, but_last, 0, "first"),
        ("behind", but_last, but_first, -1, "last"),
    ):
        want = right[others]
        ranks = [(flat, flat[own] @ want / (want @ want)) for flat in seen]
        if not all(factor and same(flat[own], factor * want) for flat, factor in ranks):
            continue
        said = f"where an element of a gradient should be, there is the one {side} it in the message"
        if all(same(flat[end], factor) for flat, factor in ranks):
            said += (
                f", and the {place} element is the count. So the count stands {place} in the message, and is "
                "read as if it stood at the other end"
            )
        return said
    return None


def _cause(case: Case) -> str | None:
    """What this case has that the ones before did not have, and how to mend it."""
    if case.gap is not None:
        return (
            f"rank {case.gap} skipped the parameter without a gradient, so the ranks added different "
            "parameters to each other: send zeros for it"
        )
    if case.transposed is not None:
        return (
            "the right numbers in the wrong places: an all-reduce adds storages element by element, and this "
            "gradient is transposed on one rank. Flatten first: flatten() follows the elements, not the "
            "storage"
        )
    return None


def _stopped(outcome: Attempt, case: Case) -> str | None:
    """A crash, a hang or a stub. If a gradient is missing on one rank only, that is nearly always why."""
    if outcome.failure is None:
        if len(outcome.calls) > 1 and not any(outcome.calls):
            return "not written yet: nothing was sent, so no rank can know the others' gradients"
        if outcome.engine:
            return "that uses zerolab's own ZeroOptimizer: use one dist.all_reduce"
        return outcome.unsound
    if case.gap is not None and _sent_alike(outcome):
        return (
            f"rank {case.gap} sent as much as the others, and failed when it wrote the average back: its "
            "parameter without a gradient still has None there. Before you send, give it zeros: "
            f"parameter.grad = torch.zeros_like(parameter) ({outcome.failure})"
        )
    if case.gap is not None:
        return (
            f"rank {case.gap} has a parameter without a gradient here. So it sends less than the others, "
            "and they wait for it or read a message meant for something else. Send zeros for it "
            f"({outcome.failure})"
        )
    if "view" in outcome.failure and case.transposed is not None:
        return (
            "a gradient need not be contiguous, and view(-1) refuses such a tensor: use flatten() or "
            "reshape(-1), which copy if they must"
        )
    return outcome.failure


def _sent_alike(outcome: Attempt) -> bool:
    """Whether a rank stopped on None after all ranks had sent equally much."""
    sizes = [[(call.op, call.numel) for call in sent] for sent in outcome.calls]
    return "NoneType" in str(outcome.failure) and bool(sizes[0]) and sizes.count(sizes[0]) == len(sizes)


def _left_out(outcome: Attempt) -> str | None:
    """Parameters that were written to, or whose gradient is still missing."""
    for rank, value in enumerate(outcome.values):
        if value.parameters_changed:
            return "the parameters were changed: average parameter.grad, not the parameter"
        for name, grad in zip(SHAPES, value.grads, strict=True):
            if grad is None:
                return (
                    f"on rank {rank} the {name} has no gradient afterwards, but another rank sent one: every "
                    "rank must make the same update, so put the average there"
                )
    return None


def _too_much_sent(outcome: Attempt) -> str | None:
    """Right values, but too many messages or too many bytes."""
    size = len(outcome.calls)
    for rank, sent in enumerate(outcome.messages):
        right = f"the values are right, but rank {rank}"
        rings = {message.call for message in sent} == {
            "ring.all_reduce"
        }  # one collective, in 2(N-1) messages
        if len(sent) > (2 * (size - 1) if rings else 1) and size > 1:
            calls = sorted({message.call for message in sent})
            return (
                f"{right} made {len(sent)} calls ({', '.join(calls)}) where 1 is enough: put the gradients, "
                "and the count after them, into one flat tensor, and all-reduce it once"
            )
        elements = sum(message.numel for message in sent)
        if elements > (2 if rings else 1) * (PSI + 1):
            gathered = any("gather" in message.op for message in sent)
            which = (
                ". That is an all-gather, which brings every rank the gradients of all" if gathered else ""
            )
            return f"{right} sent {elements} elements where {PSI} gradients and 1 count are enough{which}"
    return None
