"""Promise: a gradient that the user puts into ``grad`` trains what it does in PyTorch, or is refused."""

import sys

import cloudpickle
import pytest
import torch
from support.beside_plain import BATCH, Make, differing, on_ranks
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


def kept_gradients(make: Make, clear: str, backward_between: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = make(model, torch.optim.SGD, lr=0.1)
    model(BATCH).sum().backward()
    kept = [parameter.grad for parameter in model.parameters()]
    (optimizer if clear == "optimizer" else model).zero_grad()
    if backward_between:
        model(3 * BATCH).pow(2).sum().backward()
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad = gradient
    optimizer.step()
    return model


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    ("clear", "backward_between"), [("optimizer", True), ("optimizer", False), ("model", True)]
)
def test_gradients_of_before_zero_grad_are_refused(stage: int, clear: str, backward_between: bool):
    with pytest.raises(zerolab.WorkerError, match=r"0\.weight\.grad was set by hand"):
        on_ranks(lambda make: kept_gradients(make, clear, backward_between), stage)


@pytest.mark.parametrize("stage", range(4))
def test_gradients_that_were_put_back_before_the_engine_looked_are_as_they_were(stage: int):
    assert differing(lambda make: kept_gradients(make, "model", False), stage) == set()


def accumulated(make: Make) -> nn.Module:
    """What the user keeps is the gradient itself, which the second backward is added to."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = make(model, torch.optim.SGD, lr=0.1)
    for _ in range(3):
        model(BATCH).sum().backward()
        kept = [parameter.grad for parameter in model.parameters()]
        model(3 * BATCH).pow(2).sum().backward()
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("stage", range(4))
def test_gradients_of_this_step_may_be_put_back(stage: int):
    assert differing(accumulated, stage) == set()


def frozen(make: Make, thaw: bool, listed: bool) -> nn.Module:
    """A parameter that was frozen when the optimizer was built, and has a gradient at the step."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    model[0].weight.requires_grad_(False)
    optimizer = make(model, torch.optim.SGD, lr=0.1, params=list(model.parameters()) if listed else None)
    model[0].weight.requires_grad_(thaw)
    model(BATCH).sum().backward()
    model[0].weight.requires_grad_(False)
    if not thaw:
        model[0].weight.grad = torch.ones(5, 4)
    optimizer.step()
    return model


def left_from_before(make: Make, way: str) -> nn.Module:
    """A frozen parameter has a gradient from a training before this one, until it is cleared."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    model(BATCH).sum().backward()
    model[0].weight.requires_grad_(False)
    params = [p for p in model.parameters() if p.requires_grad] if way == "in no group" else None
    for parameter in model.parameters():
        parameter.grad = parameter.grad if parameter is model[0].weight else None
    optimizer = make(model, torch.optim.SGD, lr=0.1, params=params)
    if way != "in no group":
        optimizer.zero_grad(set_to_none=way == "set to none")
    for _ in range(2):
        model(BATCH).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("way", ["set to none", "in no group"])
def test_a_gradient_that_a_frozen_parameter_had_before_is_cleared_or_in_no_group(stage: int, way: str):
    assert differing(lambda make: left_from_before(make, way), stage) == set()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("thaw", [True, False])
@pytest.mark.parametrize("listed", [True, False])
def test_a_gradient_of_a_parameter_that_was_frozen_is_refused(stage: int, thaw: bool, listed: bool):
    with pytest.raises(zerolab.WorkerError, match=r"0\.weight was frozen when .* has a gradient now"):
        on_ranks(lambda make: frozen(make, thaw, listed), stage)
