"""Lesson 07's exercise on tensor parallelism: what a right block costs, and lost gradients."""

from zerolab.course.attempts import Attempt
from zerolab.course.lessons.residual_memory.mlp import HIDDEN, NAMES, NUMEL
from zerolab.course.messages import Message, sent_bytes
from zerolab.course.targets import bronze


def no_gradient(outcome: Attempt) -> str | None:
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


def recorded(outcome: Attempt) -> str | None:
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


def wrong_bytes(outcome: Attempt) -> str | None:
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


def whole_products(outcome: Attempt) -> str | None:
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
