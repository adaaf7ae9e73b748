"""Promise: torch.func works below stage 3 and inside full_params(), and gradients of gradients everywhere."""

import contextlib
import sys

import cloudpickle
import pytest
import torch
from support.trained import on_two_ranks
from torch import nn
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


def in_forward_mode(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The same as jvp with the context that is below it, and without torch.func."""
    with forward_ad.dual_level():
        output = model(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(output).tangent.square().mean()


LOSSES = {
    "vmap": lambda m, x: vmap(lambda x: m(x).square().mean())(x).mean(),
    "func.grad": lambda m, x: vmap(grad(lambda x: m(x).square().mean()))(x).square().mean(),
    "jvp": lambda m, x: jvp(m, (x,), (torch.ones_like(x),))[1].square().mean(),
    "dual_level": in_forward_mode,
    "create_graph": lambda m, x: torch.autograd.grad(m(x).sum(), x, create_graph=True)[0].square().mean(),
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def inputs() -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


def train(stage: int, name: str, whole: bool) -> list[torch.Tensor]:
    model = build()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
    with optimizer.full_params() if whole else contextlib.nullcontext():
        LOSSES[name](model, inputs()).backward()
    optimizer.step()
    with optimizer.full_params():
        return [p.detach().clone() for p in model.parameters()]


def train_here(name: str) -> list[torch.Tensor]:
    torch.set_num_threads(1)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    LOSSES[name](model, inputs()).backward()
    optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("stage, whole", [(0, False), (2, False), (3, True)])
def test_the_same_bits(stage: int, whole: bool, name: str):
    """Both ranks have the same data, so their mean is one process's gradient."""
    for found in on_two_ranks(train, stage, name, whole):
        assert all(map(torch.equal, found, train_here(name)))


def test_gradients_of_gradients_at_stage_3():
    for found in on_two_ranks(train, 3, "create_graph", False):
        assert all(map(torch.equal, found, train_here("create_graph")))


@pytest.mark.parametrize("name", ["vmap", "func.grad", "jvp", "dual_level"])
def test_at_stage_3_outside_full_params_they_are_refused(name: str):
    with pytest.raises(zerolab.WorkerError, match=r"refused at stage 3, .* take stage 2, or .*full_params"):
        on_two_ranks(train, 3, name, False)
