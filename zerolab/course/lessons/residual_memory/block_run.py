"""Lesson 07's exercise on tensor parallelism: run a reader's block on a rank, and watch its operators."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
from torch.utils.flop_counter import FlopCounterMode

from zerolab.course.attempts import Odd, returned, told
from zerolab.course.lessons.residual_memory import operators
from zerolab.course.lessons.residual_memory.by_hand import by_hand
from zerolab.course.lessons.residual_memory.mlp import NAMES, inputs, output_gradient
from zerolab.course.wire import calls_made, given

OTHER_SEED = 9  # of the weights of a second call


class Ran(NamedTuple):
    """What a rank's block returned.

    Attributes:
        gradients: of x and the weights, by name; None where none came.
        early: whether they came before the check called backward.
        drew: whether the block drew random numbers, as dropout does.
        changed: the names of the tensors that the block wrote to.
        again: what it returned of other weights, in a second call.
        wrote: which ways of an operator wrote to the tensor that they were given, "forward" or "backward".
        calls: how many calls were made by the end of the first backward.
        flops: of the products of the first forward.
    """

    output: torch.Tensor | Odd
    gradients: Mapping[str, torch.Tensor | None]
    early: bool
    drew: bool
    changed: list[str]
    again: torch.Tensor | Odd
    wrote: list[str]
    calls: int
    flops: int


def both_passes(fn: Callable, rank: int) -> Ran:
    """In the worker: run fn and backward from its output, and fn once more with other weights."""
    mlp = inputs()
    with by_hand("dist.all_reduce"), _watched() as wrote:
        generator = torch.get_rng_state()
        with FlopCounterMode(display=False) as products:
            output = fn(*mlp)
        drew = not torch.equal(generator, torch.get_rng_state())
        early = any(tensor.grad is not None for tensor in mlp)
        good = isinstance(output, torch.Tensor) and kind(output) == kind(mlp.x)
        if good and output.requires_grad and not early:
            output.backward(output_gradient())
        calls, again = calls_made(), None
        if good and not early:
            try:
                again = fn(*inputs(OTHER_SEED))
            except Exception as error:
                raise told(error, "other weights, in a second call") from None
    changed = [name for name, now, was in zip(NAMES, mlp, inputs(), strict=True) if not now.equal(was)]
    gradients = dict(zip(NAMES, (tensor.grad for tensor in mlp), strict=True))
    flops = products.get_total_flops()
    return Ran(returned(output), gradients, early, drew, changed, returned(again), wrote, calls, flops)


@contextmanager
def _watched() -> Iterator[list[str]]:
    """Note which ways of an operator write to the tensor that they are given."""
    wrote: list[str] = []
    plain = operators._Operator.apply

    def watching(name: str, way: operators.Way) -> operators.Way:
        def watched(tensor: torch.Tensor) -> torch.Tensor:
            before = tensor.detach().clone()
            value = way(given(tensor))
            if not before.equal(tensor):
                wrote.append(name)
            return value

        return watched

    def apply(tensor: torch.Tensor, forward: operators.Way, backward: operators.Way) -> torch.Tensor:
        return plain(tensor, watching("forward", forward), watching("backward", backward))

    with mock.patch.object(operators._Operator, "apply", apply):
        yield wrote


def kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
