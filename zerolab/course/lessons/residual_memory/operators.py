"""Lesson 07's tool for the exercise on tensor parallelism: a function with a backward pass of its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Way = Callable[[torch.Tensor], torch.Tensor]


def operator(tensor: torch.Tensor, forward: Way, backward: Way) -> torch.Tensor:
    """Return ``forward(tensor)``, and let autograd pass ``backward(gradient)`` on to ``tensor``.

    It is a `torch.autograd.Function` in one call. `forward` runs at once, and autograd does not look inside.
    `backward` runs in the backward pass, with the gradient of what was returned.

    Raises: TypeError where one of the two is no function, or returns no tensor.
    """
    for name, way in (("forward", forward), ("backward", backward)):
        if not callable(way):
            what = "None" if way is None else f"a {type(way).__name__}"
            raise TypeError(f"operator: {name} is {what}, and has to be a function of a tensor")
    return _Operator.apply(tensor, forward, backward)


class _Operator(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, there: Way, back: Way) -> torch.Tensor:
        ctx.back = back
        return _tensor("forward", there(tensor.view_as(tensor)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor):
        return _tensor("backward", ctx.back(gradient)), None, None


def _tensor(name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        nothing = " (dist.all_reduce works in place and returns nothing)" * (value is None)
        raise TypeError(
            f"operator: {name} returned {type(value).__name__}, and has to return a tensor{nothing}"
        )
    return value
