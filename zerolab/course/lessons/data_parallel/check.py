"""Lesson 03's exercise: average gradients over ranks, graded on values, gaps, layout and messages."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from zerolab.course.exercise import Attempt, attempt, graded, total

SHAPES = {"weight": (4, 3), "bias": (4,), "gate": (2, 2)}
PSI = sum(torch.Size(shape).numel() for shape in SHAPES.values())


class Case(NamedTuple):
    """Tokens by rank; the rank without a gradient for the gate; the one whose weight gradient is turned."""

    counts: tuple[int, ...]
    gap: int | None = None
    transposed: int | None = None
    meaning: str = ""


CASES = (
    Case((8, 8), meaning="2 ranks with 8 tokens each"),
    Case((30, 10, 20), meaning="3 ranks with 30, 10 and 20 tokens"),
    Case((8, 8), gap=1, meaning="the gate has no gradient on rank 1"),
    Case((8, 8), gap=0, meaning="the gate has no gradient on rank 0"),
    Case((8, 8), transposed=1, meaning="rank 1's weight gradient is a transposed tensor"),
    Case((8,), meaning="1 rank"),
)


@graded(
    "Your averaging is right on 1, 2 and 3 ranks: unequal token counts, a missing gradient, a transposed "
    "one, and one message for all."
)
def check_average_gradients(fn: Callable) -> str | None:
    """Run fn(parameters, count) on 1 to 3 ranks and print the mistake it makes, or that it makes none.

    fn leaves in every `parameter.grad` the gradient of the mean over all ranks' tokens, in one message. Wrong
    values are named before superfluous messages.
    """
    too_much = None
    for case in CASES:
        outcome = attempt(_average, [(fn, case, rank) for rank in range(len(case.counts))])
        wrong = _not_written(outcome) or _stopped(outcome, case) or _wrong_value(outcome, case)
        if wrong:
            return f"{wrong} (seen with: {case.meaning})"
        too_much = too_much or _too_much_sent(outcome, case)
    return too_much


def gradient(name: str, rank: int) -> torch.Tensor:
    """The gradient that rank brings for a parameter: different for every rank and element."""
    generator = torch.Generator().manual_seed(100 * rank + len(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


def _average(fn: Callable, case: Case, rank: int) -> list[torch.Tensor | None]:
    """In the worker: the gradients of `case` after fn has averaged them."""
    parameters = {name: torch.nn.Parameter(torch.ones(SHAPES[name], dtype=torch.float64)) for name in SHAPES}
    for name, parameter in parameters.items():
        parameter.grad = None if name == "gate" and case.gap == rank else gradient(name, rank)
    if case.transposed == rank:
        parameters["weight"].grad = gradient("weight", rank).t().contiguous().t()
    fn(list(parameters.values()), case.counts[rank])
    if any(not torch.equal(p, torch.ones_like(p)) for p in parameters.values()):
        raise RuntimeError("the parameters were changed: average parameter.grad, not the parameter")
    return [None if p.grad is None else p.grad.clone() for p in parameters.values()]


def _not_written(outcome: Attempt) -> str | None:
    if outcome.failure is None and len(outcome.messages) > 1 and not any(outcome.messages):
        return "not written yet: nothing was sent, so no rank can know the others' gradients"
    return None


def _stopped(outcome: Attempt, case: Case) -> str | None:
    """A crash or a hang. If a gradient is missing on one rank only, that is nearly always why."""
    if outcome.failure is None:
        return None
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


def _wrong_value(outcome: Attempt, case: Case) -> str | None:
    wanted = _candidates(case)
    for rank, grads in enumerate(outcome.values):
        for name, got in zip(SHAPES, grads, strict=True):
            if got is None:
                return (
                    f"on rank {rank} the {name} still has no gradient, but another rank sent one: every "
                    "rank must make the same update, so put the average there"
                )
            right = wanted["right"][name]
            if got.shape == right.shape and torch.allclose(got, right, rtol=1e-9, atol=0):
                continue
            return _explain(got, name, rank, wanted, case)
    return None


def _candidates(case: Case) -> dict[str, dict[str, torch.Tensor]]:
    """For each parameter the right answer, and the wrong ones under the mistake that leads to them."""
    counts = case.counts
    found: dict[str, dict[str, torch.Tensor]] = {"right": {}, **{why: {} for why in WHY}}
    for name in SHAPES:
        missing = case.gap if name == "gate" else None
        mine = [gradient(name, rank) * (rank != missing) for rank in range(len(counts))]
        summed, weighted = total(mine), total(count * grad for count, grad in zip(counts, mine, strict=True))
        right = weighted / sum(counts)
        values = (right, summed, summed / len(counts), weighted, right / len(counts))
        for answers, value in zip(found.values(), values, strict=True):
            answers[name] = value
    return found


WHY = (
    "that is the sum over the ranks, not the mean: with N ranks every step would be N times too long",
    "that is the mean of the ranks' means, and the ranks have different numbers of tokens: multiply each "
    "gradient by its count, and divide by the sum of the counts",
    "multiplied by the counts, and never divided by the sum of the counts",
    "divided once too often: after multiplying by the counts, divide by their sum only",
)


def _explain(got: torch.Tensor, name: str, rank: int, wanted: dict, case: Case) -> str:
    for why in WHY:
        if torch.allclose(got, wanted[why][name], rtol=1e-9, atol=0):
            return why
    if torch.equal(got, gradient(name, rank)):
        return (
            f"the {name}'s gradient on rank {rank} is what it was before: contiguous(), flatten() and cat "
            "make copies, so copy the average back into parameter.grad"
        )
    if case.transposed is not None and torch.allclose(got.sum(), wanted["right"][name].sum(), rtol=1e-9):
        return (
            "the right numbers in the wrong places: an all-reduce adds storages byte by byte, and this "
            "gradient is transposed on one rank. Flatten first: flatten() follows the elements, not the "
            "storage"
        )
    if case.gap is not None:
        return (
            f"rank {case.gap} skipped the parameter without a gradient, so the ranks added different "
            "parameters to each other: send zeros for it"
        )
    return f"rank {rank}'s gradient of the {name} is not the mean over all tokens"


def _too_much_sent(outcome: Attempt, case: Case) -> str | None:
    """Right values, but too many messages or too many bytes."""
    for rank, sent in enumerate(outcome.messages):
        right = f"the values are right, but rank {rank}"
        if len(sent) > 1 and len(case.counts) > 1:
            return (
                f"{right} made {len(sent)} calls where 1 is enough: put the gradients, and the count after "
                "them, into one flat tensor"
            )
        if (elements := sum(message.numel for message in sent)) > PSI + 1:
            return f"{right} sent {elements} elements where {PSI} gradients and 1 count are enough"
    return None
