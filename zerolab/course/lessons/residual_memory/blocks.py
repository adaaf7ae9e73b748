"""Lesson 07's exercise on tensor parallelism: a block whose two linear layers are cut over the ranks."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from zerolab.course.attempts import Attempt, Odd, attempt, returned, told
from zerolab.course.evidence import Finding, examine, same
from zerolab.course.exercise import graded
from zerolab.course.lessons.residual_memory import wrong_parts
from zerolab.course.lessons.residual_memory.by_hand import by_hand
from zerolab.course.lessons.residual_memory.mlp import (
    HIDDEN,
    MISTAKES,
    NAMES,
    NUMEL,
    OUTPUTS,
    RANKS,
    Parts,
    Predicted,
    inputs,
    output_gradient,
    parts,
    right,
)
from zerolab.course.lessons.residual_memory.solution import f, g, split_mlp, summed
from zerolab.course.targets import bronze
from zerolab.course.wire import Message, calls_made, sent_bytes

OTHER_SEED = 9  # of the weights of a second call
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


class Ran(NamedTuple):
    """What a rank's block returned.

    Attributes:
        gradients: of x and the weights, by name; None where none came.
        early: whether they came before the check called backward.
        drew: whether the block drew random numbers, as dropout does.
        changed: the names of the tensors that the block wrote to.
        again: what it returned of other weights, in a second call.
        calls: how many calls were made by the end of the first backward.
        flops: of the products of the first forward.
    """

    output: torch.Tensor | Odd
    gradients: Mapping[str, torch.Tensor | None]
    early: bool
    drew: bool
    changed: list[str]
    again: torch.Tensor | Odd
    calls: int
    flops: int


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


def _both_passes(fn: Callable, rank: int) -> Ran:
    """In the worker: run fn and backward from its output, and fn once more with other weights."""
    given = inputs()
    with by_hand("dist.all_reduce"):
        generator = torch.get_rng_state()
        with FlopCounterMode(display=False) as products:
            output = fn(*given)
        drew = not torch.equal(generator, torch.get_rng_state())
        early = any(tensor.grad is not None for tensor in given)
        good = isinstance(output, torch.Tensor) and _kind(output) == _kind(given.x)
        if good and output.requires_grad and not early:
            output.backward(output_gradient())
        calls, again = calls_made(), None
        if good and not early:
            try:
                again = fn(*inputs(OTHER_SEED))
            except Exception as error:
                raise told(error, "other weights, in a second call") from None
    changed = [name for name, now, was in zip(NAMES, given, inputs(), strict=True) if not now.equal(was)]
    gradients = dict(zip(NAMES, (tensor.grad for tensor in given), strict=True))
    flops = products.get_total_flops()
    return Ran(returned(output), gradients, early, drew, changed, returned(again), calls, flops)


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _look(fn: Callable, size: int) -> Finding:
    where, ranks = f"{size} ranks", range(size)
    outcome = attempt(_both_passes, [(fn, rank) for rank in ranks])
    if stopped := _stopped(outcome):
        return Finding(where, stopped)
    whole, cause = parts(size), _recorded(outcome)
    found = _of_output(where, outcome, whole)
    if not found.wrong:
        if missing := _no_gradient(outcome):
            return Finding(where, missing)
        gradients = [_of_gradient(where, outcome, whole, name) for name in _in_order(outcome, whole)]
        found = next((each for each in gradients if each.wrong), found)
    if not found.wrong and (kept := _kept(outcome)):
        return Finding(where, kept)
    found.also = outcome.hint_of_calls
    found.cause = (cause or found.cause) if found.wrong else None
    found.cost = cause or _whole_products(outcome) or _wrong_bytes(outcome)
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
    through = {f"what comes through rank {r}'s part": each.get(name, zeros) for r, each in
               enumerate(whole.gradients)}  # fmt: skip
    found = Finding(
        f"{where}, in {name}.grad",
        None,
        seen,
        wants,
        _predicted(MISTAKES[name], whole),
        lambda rank: [through] if name != "b2" else [],
    )
    if found.wrong:
        rank = found.wrong[0]
        found.cause = wrong_parts.of_gradient(name, seen[rank], wants[rank])
    return found


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


def _no_gradient(outcome: Attempt) -> str | None:
    """Name the tensors that have a gradient on no rank."""
    missing = [name for name in NAMES if all(v.gradients[name] is None for v in outcome.values)]
    if missing == list(NAMES):
        return (
            "the output is right, and autograd finds no way back from it: no tensor has a gradient. What a "
            "collective receives has no history, and .detach(), .data and torch.no_grad() end it. g is "
            "operator(product, forward=..., backward=...)"
        )
    if missing:
        return (
            f"the output is right, and {', '.join(missing)} {'has' if len(missing) == 1 else 'have'} no "
            "gradient after the backward pass: .detach(), .data, torch.no_grad() or a collective stands "
            "between. Compute with slices of what you were given, and pass x through f alone"
        )
    return None


def _recorded(outcome: Attempt) -> str | None:
    """Name a collective that wrote to a tensor of the autograd graph."""
    found: list[Message] = [call for own in outcome.calls for call in own if call.recorded]
    written = [call for call in found if call.op != "send"]
    if not written:
        return None
    place = f" ({written[0].place})" if written[0].place else ""
    return (
        f"{written[0].call} writes to a tensor that autograd records, and autograd does not know the "
        "gradient of a sum over ranks. PyTorch warns that the result may be silently wrong. Call it inside "
        f"operator(...), where autograd does not look{place}"
    )


def _wrong_bytes(outcome: Attempt) -> str | None:
    """More or less than an all-reduce of the output and one of x's gradient, as a ring sends them."""
    size = len(outcome.values)
    allowed = 2 * 2 * 8 * NUMEL * (size - 1) / size
    for rank, values in enumerate(outcome.values):
        own = [call for call in outcome.calls[rank][: values.calls] if not call.received]
        sent = sent_bytes(own, size)
        if abs(sent - allowed) < 1:
            continue
        calls = ", ".join(sorted({message.call for message in own})) or "no call that the check sees"
        return bronze(
            f"rank {rank} sends {sent:,.0f} bytes ({calls}), and two all-reduces send {allowed:,.0f}: one of "
            "the products in forward, and one of x's gradient in backward"
        )
    return None


def _whole_products(outcome: Attempt) -> str | None:
    """More products than those of a rank's parts."""
    size = len(outcome.values)
    of_parts = 2 * 2 * NUMEL * HIDDEN // size
    for rank, values in enumerate(outcome.values):
        if values.flops > 1.25 * of_parts:
            return bronze(
                f"the products of rank {rank} are {values.flops:,} floating-point operations in forward, and "
                f"those of its parts are {of_parts:,}: cut the weights before you multiply, so that each "
                "rank computes 1/N"
            )
    return None
