"""Lesson 03's exercise: average gradients over ranks, graded on values, gaps, layout and messages."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from zerolab.course.attempt import Attempt, attempt
from zerolab.course.evidence import Finding, examine
from zerolab.course.exercise import graded
from zerolab.course.lessons.data_parallel.solution import average_gradients

SHAPES = {"weight": (8, 6), "bias": (8,), "gate": (4, 4)}
SIZES = [torch.Size(shape).numel() for shape in SHAPES.values()]
PSI = sum(SIZES)
HINTS = (
    "multiply each gradient by this rank's count, add up over the ranks, and divide by the sum of the "
    "counts.",
    "put zeros in place of a missing gradient. Then torch.cat the flattened gradients, and the count after "
    "them, into one tensor: one dist.all_reduce sums everything.",
    "split the summed tensor at the parameters' sizes, divide each piece by the summed count (the last "
    "element), and copy it back: parameter.grad.copy_(piece.view_as(parameter)).",
)


class Case(NamedTuple):
    """Tokens by rank; the rank without a gradient for the gate; the one whose weight gradient is turned."""

    meaning: str
    counts: tuple[int, ...]
    gap: int | None = None
    transposed: int | None = None


CASES = (
    Case("3 ranks with 30, 10 and 20 tokens", (30, 10, 20)),
    Case("2 ranks with 8 tokens each", (8, 8)),
    Case("2 ranks, and no gradient for the gate on rank 1", (8, 24), gap=1),
    Case("2 ranks, and no gradient for the gate on rank 0", (8, 24), gap=0),
    Case("2 ranks, and a transposed weight gradient on rank 1", (8, 24), transposed=1),
    Case("4 ranks with 1, 2, 3 and 4 tokens", (1, 2, 3, 4)),
    Case("1 rank", (8,)),
)

# A sentence, and what it leads to: `g` holds the ranks' gradients, `c` their counts, r is the rank.
# fmt: off
MISTAKES = {
    "that is the sum over the ranks, not the mean: with N ranks every step would be N times too long":
        lambda g, c, r: sum(g),
    "that is the mean of the ranks' means, and the ranks have different numbers of tokens: multiply each "
    "gradient by its count, and divide by the sum of the counts":
        lambda g, c, r: sum(g) / len(g),
    "multiplied by the counts, and never divided by the sum of the counts":
        lambda g, c, r: weighted(g, c),
    "divided once too often: after multiplying by the counts, divide by their sum only":
        lambda g, c, r: weighted(g, c) / sum(c) / len(c),
    "divided by the number of ranks after multiplying by the counts: divide by the sum of the counts":
        lambda g, c, r: weighted(g, c) / len(c),
    "divided by this rank's own count: divide by the sum of all ranks' counts":
        lambda g, c, r: weighted(g, c) / c[r],
    "divided by the sum of the counts, and never multiplied by them: multiply each gradient by its rank's "
    "count":
        lambda g, c, r: sum(g) / sum(c),
    "multiplied by this rank's count after the sum: multiply before it, each gradient by its own rank's "
    "count":
        lambda g, c, r: sum(g) * c[r] / sum(c),
    "each gradient was divided by its count: it is a mean already, so multiply by the count":
        lambda g, c, r: sum(each / count for each, count in zip(g, c, strict=True)),
    "the gradient is what it was before: contiguous(), flatten() and cat make copies, so copy the average "
    "back into parameter.grad":
        lambda g, c, r: g[r],
    "only multiplied by this rank's count: nothing that the other ranks sent was used":
        lambda g, c, r: g[r] * c[r],
    "only this rank's own share, count/total of its gradient: nothing that the other ranks sent was added":
        lambda g, c, r: g[r] * c[r] / sum(c),
    "every rank has rank 0's gradient: a broadcast copies, and an all-reduce adds":
        lambda g, c, r: g[0],
    "the average was added to the old gradient: put it in its place":
        lambda g, c, r: weighted(g, c) / sum(c) + g[r],
    "the gradients were set to zero and stayed so: copy the average into them":
        lambda g, c, r: torch.zeros_like(g[r]),
}
# fmt: on


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


def gradient(name: str, rank: int) -> torch.Tensor:
    """The gradient that rank brings for a parameter: different for every rank and element."""
    generator = torch.Generator().manual_seed(100 * rank + len(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


def weighted(gradients: list[torch.Tensor], counts: tuple[int, ...]) -> torch.Tensor:
    """The sum of the ranks' gradients, each times its count of tokens."""
    return sum(count * each for count, each in zip(counts, gradients, strict=True))


def _average(fn: Callable, case: Case, rank: int) -> Averaged:
    """In the worker: the gradients of `case` after fn has averaged them."""
    values = [torch.full(shape, rank + 1.0, dtype=torch.float64) for shape in SHAPES.values()]
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    for name, parameter in zip(SHAPES, parameters, strict=True):
        parameter.grad = None if name == "gate" and case.gap == rank else gradient(name, rank)
    if case.transposed == rank:
        parameters[0].grad = parameters[0].grad.t().contiguous().t()
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
    if case.gap is not None:
        mistakes |= _without_the_gap(brought, case)
    parts = lambda rank: [{f"rank {peer}'s gradient": each for peer, each in enumerate(brought)}]
    cause = _cause(case)
    finding = Finding(
        case.meaning, None, seen, right, mistakes, parts, cost=_too_much_sent(outcome), cause=cause
    )
    return finding if finding.fitting() or not finding.wrong else _one_parameter(finding)


def _flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _one_parameter(finding: Finding) -> Finding:
    """The same for the first parameter that is wrong, where others are right."""
    cut = lambda values, index: [value.split(SIZES)[index] for value in values]
    for index, name in enumerate(SHAPES):
        of_one = Finding(
            f"{finding.where}, in the {name}",
            None,
            cut(finding.seen, index),
            cut(finding.right, index),
            {why: cut(values, index) for why, values in finding.mistakes.items()},
            lambda rank, index=index: [{k: p.split(SIZES)[index] for k, p in finding.parts(rank)[0].items()}],
            cause=finding.cause,
        )
        if of_one.wrong:
            return of_one
    return finding


def _without_the_gap(brought: list[torch.Tensor], case: Case) -> dict[str, list[torch.Tensor]]:
    """The mean over those ranks only that have a gradient."""
    present = sum(count for rank, count in enumerate(case.counts) if rank != case.gap)
    value = (weighted(brought, case.counts) / sum(case.counts)).split(SIZES)
    value = _flat([*value[:2], value[2] * sum(case.counts) / present])
    return {
        "the tokens of a rank without a gradient were left out of the count: its "
        "gradient is zero, and its tokens count": [value] * len(brought)
    }


def _cause(case: Case) -> str | None:
    """What this case has that the ones before did not have, and how to mend it."""
    if case.gap is not None:
        return (
            f"rank {case.gap} skipped the parameter without a gradient, so the ranks added different "
            "parameters to each other: send zeros for it"
        )
    if case.transposed is not None:
        return (
            "the right numbers in the wrong places: an all-reduce adds storages byte by byte, and this "
            "gradient is transposed on one rank. Flatten first: flatten() follows the elements, not the "
            "storage"
        )
    return None


def _stopped(outcome: Attempt, case: Case) -> str | None:
    """A crash, a hang or a stub. If a gradient is missing on one rank only, that is nearly always why."""
    if outcome.failure is None:
        if len(outcome.calls) > 1 and not any(outcome.calls):
            return "not written yet: nothing was sent, so no rank can know the others' gradients"
        return "that uses zerolab's own ZeroOptimizer: use one dist.all_reduce" if outcome.engine else None
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
