"""Lesson 07's exercise on tensor parallelism: a block whose two linear layers are cut over the ranks."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from zerolab.course.attempts import Attempt, Odd, attempt
from zerolab.course.evidence import Finding, examine, same
from zerolab.course.exercise import graded
from zerolab.course.lessons.residual_memory import wirings, wrong_parts
from zerolab.course.lessons.residual_memory.block_costs import (
    no_gradient,
    recorded,
    whole_products,
    wrong_bytes,
)
from zerolab.course.lessons.residual_memory.block_mistakes import (
    BY_WEIGHTS,
    MISTAKES,
    OUTPUTS,
    Predicted,
)
from zerolab.course.lessons.residual_memory.block_run import OTHER_SEED, both_passes
from zerolab.course.lessons.residual_memory.mlp import NAMES, RANKS, Parts, inputs, parts, right
from zerolab.course.lessons.residual_memory.solution import f, g, split_mlp, summed

HINTS = (
    "cut first: w1.chunk(N)[rank] and b1.chunk(N)[rank] are this rank's hidden features, and "
    "w2.chunk(N, dim=1)[rank] is what the second layer does with them. b2 stays whole, and is added last.",
    "the partial products of all ranks add up to the output: that is g's forward pass. x went to all ranks, "
    "so the gradients that come back from them add up: that is f's backward pass. Their other passes return "
    "what they get.",
    "summed(tensor) clones the tensor, calls dist.all_reduce on the clone and returns it. f is operator(x, "
    "forward=lambda x: x, backward=summed), and g has the two the other way round.",
)
_CUT = (
    ". A weight has the shape [outputs, inputs], and so w1 is (24, 12) and w2 (12, 24). w1.chunk(N)[rank] "
    "and b1.chunk(N)[rank] are a rank's outputs of the first layer, the inputs of w2.chunk(N, dim=1)[rank]"
)


@graded(
    "Silver: on 2, 3 and 4 ranks the output and all gradients are those of the whole block, and a rank sends "
    "two all-reduces, one in forward and one in backward. That is Megatron's MLP.",
    call="split_mlp(x, w1, b1, w2, b2)",
    hints=HINTS,
    solution=[summed, f, g, split_mlp],
)
def check_block(fn: Callable) -> str | None:
    """Run fn(x, w1, b1, w2, b2) on 2 to 4 ranks, forward and backward: each computes with its part alone.

    Bronze for the output and the gradients of the whole block, also in a second call; silver for two
    all-reduces and products of 1/N.
    """
    return examine(RANKS, partial(_look, fn))


def _look(fn: Callable, size: int) -> Finding:
    where, ranks = f"{size} ranks", range(size)
    outcome = attempt(both_passes, [(fn, rank) for rank in ranks])
    if stopped := _stopped(outcome):
        return Finding(where, stopped)
    whole, cause = parts(size), recorded(outcome)
    found = _of_output(where, outcome, whole)
    if not found.wrong:
        if missing := no_gradient(outcome):
            return Finding(where, missing)
        gradients = [_of_gradient(where, outcome, whole, name) for name in _in_order(outcome, whole)]
        found = next((each for each in gradients if each.wrong), found)
    if not found.wrong and (problem := _kept(outcome) or _in_place(outcome)):
        return Finding(where, problem)
    if found.wrong and not cause and not found.told and not found.fitting(found.wrong):
        seen = [(values.output, values.gradients) for values in outcome.values]
        found.told = wirings.told(*zip(*seen, strict=True))
    found.also = outcome.hint_of_calls
    found.cause = (cause or found.cause) if found.wrong else None
    found.cost = cause or whole_products(outcome) or wrong_bytes(outcome)
    return found


def _in_order(outcome: Attempt, whole: Parts) -> Sequence[str]:
    """Return the names: x first, but last where g divides, because x.grad then looks as if f did."""
    of_w2 = [values.gradients["w2"] for values in outcome.values]
    wants = [want / whole.size for want in right(whole, "w2")]
    divided = all(got is not None and same(got, want) for got, want in zip(of_w2, wants, strict=True))
    return (*NAMES[1:], "x") if divided else NAMES


def _kept(outcome: Attempt) -> str | None:
    """Whether a second call is wrong, after a right one."""
    want = inputs(OTHER_SEED)
    output = (want.product() + want.b2).detach()
    if all(same(values.again, output) for values in outcome.values):
        return None
    return (
        "the first call is right, and a second one with other weights is not: compute from the arguments, "
        "and keep nothing from one call to the next"
    )


def _in_place(outcome: Attempt) -> str | None:
    """Whether a way of an operator writes to the tensor that it is given, and which call does so."""
    way = next((values.wrote[0] for values in outcome.values if values.wrote), None)
    if not way:
        return None
    calls = [call for own in outcome.calls for call in own if call.given and call.op != "send"]
    place = f" ({calls[0].place})" if calls and calls[0].place else ""
    return (
        f"the {way} of an operator writes to the tensor that it is given, which belongs to autograd: "
        "dist.all_reduce works in place. Give it a clone, so that the sum is in a tensor of its "
        f"own{place}"
    )


def _of_output(where: str, outcome: Attempt, whole: Parts) -> Finding:
    output = whole.product + whole.mlp.b2
    added = {f"rank {peer}'s product": product for peer, product in enumerate(whole.products)}
    seen = [values.output for values in outcome.values]
    found = Finding(
        f"{where}, in the output",
        None,
        seen,
        [output] * whole.size,
        _predicted(OUTPUTS, whole),
        lambda rank: [{**added, "b2": whole.mlp.b2.expand_as(output)}],
    )
    found.told = wrong_parts.of_output(seen, whole) if found.wrong else None
    if found.wrong and any(values.drew for values in outcome.values):
        found.told = "the block draws random numbers, as dropout does, and this one has none: take it out"
    return found


def _of_gradient(where: str, outcome: Attempt, whole: Parts, name: str) -> Finding:
    """Return a gradient on all ranks; one that never came is zeros."""
    zeros = torch.zeros_like(getattr(whole.mlp, name))
    gradients = [values.gradients[name] for values in outcome.values]
    seen = [zeros if gradient is None else gradient for gradient in gradients]
    wants = right(whole, name)
    of_g = name == "x" and _right(outcome, whole, "b2") and not _right(outcome, whole, "w1", "b1", "w2")
    mistakes = MISTAKES[name] | (BY_WEIGHTS if of_g else {})
    through = {f"what comes through rank {r}'s part": each.get(name, zeros) for r, each in
               enumerate(whole.gradients)}  # fmt: skip
    found = Finding(
        f"{where}, in {name}.grad",
        None,
        seen,
        wants,
        _predicted(mistakes, whole),
        lambda rank: [through] if name != "b2" else [],
    )
    if found.wrong:
        rank = found.wrong[0]
        found.cause = wrong_parts.of_gradient(name, seen[rank], wants[rank])
    return found


def _right(outcome: Attempt, whole: Parts, *names: str) -> bool:
    """Whether the gradients of these are right on all ranks. Those of weights have passed g's backward."""
    for name in names:
        for values, want in zip(outcome.values, right(whole, name), strict=True):
            got = values.gradients[name]
            if got is None or not same(got, want):
                return False
    return True


def _predicted(mistakes: Mapping[str, Predicted], whole: Parts) -> dict[str, list[torch.Tensor]]:
    return {why: [value(whole, rank) for rank in range(whole.size)] for why, value in mistakes.items()}


def _stopped(outcome: Attempt) -> str | None:
    if outcome.failure:
        about_shapes = any(word in outcome.failure for word in ("shape", "must match", "size"))
        return outcome.failure + _CUT * (about_shapes and "RuntimeError" in outcome.failure)
    if not any(outcome.calls) and _nothing(outcome):
        return "not written yet: nothing was sent and None was returned"
    if any(values.early for values in outcome.values):
        return (
            "your function computes gradients itself, and the check does that afterwards: return the output, "
            "and leave backward() to the caller"
        )
    changed = next((values.changed for values in outcome.values if values.changed), None)
    if changed:
        return (
            f"your function writes to {' and '.join(changed)}: the caller needs the values that it gave. "
            "Compute with slices, and write to a tensor of your own"
        )
    return outcome.unsound


def _nothing(outcome: Attempt) -> bool:
    outputs = [values.output for values in outcome.values]
    return all(isinstance(output, Odd) and output.kind == "NoneType" for output in outputs)
