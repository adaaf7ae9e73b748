"""One loop, written once, run with a torch optimizer in one process and with ZeroOptimizer on two ranks.

Every rank has the same batches, so the mean of the gradients is that of one process, to the last bit.
"""

import sys
from collections.abc import Callable
from functools import partial

import cloudpickle
import torch
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

Make = Callable[..., torch.optim.Optimizer]
"""Builds the optimizer: make(model, torch.optim.Adam, lr=0.1, params=...)."""
Loop = Callable[[Make], nn.Module]
"""A training loop, which returns its model at the end."""

BATCH = torch.arange(8.0).view(2, 4) / 8


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def plain(loop: Loop) -> dict[str, torch.Tensor]:
    """The parameters after the loop in one process."""

    def make(model: nn.Module, optimizer_class: type, params: list | None = None, **keywords):
        return optimizer_class(list(model.parameters()) if params is None else params, **keywords)

    torch.manual_seed(0)
    return values(loop(make))


def sharded(loop: Loop, stage: int) -> dict[str, torch.Tensor]:
    """On a rank: the parameters after the loop."""
    made = []

    def make(model: nn.Module, optimizer_class: type, **keywords):
        made.append(zerolab.ZeroOptimizer(model, optimizer_class, stage=stage, **keywords))
        return made[-1]

    torch.manual_seed(0)
    model = loop(make)
    with made[-1].full_params():
        return values(model)


def on_ranks(loop: Loop, stage: int) -> list[dict[str, torch.Tensor]]:
    """By rank: the parameters after the loop at a stage."""
    return zerolab.launch(partial(sharded, loop), 2, stage, timeout=60)


def differing(loop: Loop, stage: int) -> set[str]:
    """The parameters that differ on any rank; NaN differs from everything."""
    expected = plain(loop)
    found = on_ranks(loop, stage)
    return {name for each in found for name in expected if not torch.equal(each[name], expected[name])}
