"""Promise: a parameter or gradient that the user replaced by another tensor is used or refused."""

import copy
import sys

import cloudpickle
import pytest
import torch
from support import training
from support.trained import build, on_two_ranks, train
from support.training import WIDTH
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["data", "double", "assign", "replace"])
def test_a_parameter_that_left_the_flat_buffer_is_noticed(stage: int, how: str):
    """Torch's own optimizers would go on with the old tensor, or the new: never would it not be told."""

    def use(stage: int, how: str) -> str:
        model, optimizer = build(stage)
        train(model, optimizer)
        with optimizer.full_params():
            if how == "data":
                model.after.weight.data = model.after.weight.data.clone()
            elif how == "double":
                model.double().float()
            elif how == "assign":
                model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
            else:
                model.after.weight = nn.Parameter(model.after.weight.detach().clone())
        train(model, optimizer)
        return "no error"

    try:
        found = on_two_ranks(use, stage, how)
    except zerolab.WorkerError as error:
        assert isinstance(error.__cause__, RuntimeError), error
        assert "parameter" in str(error.__cause__), error
    else:
        raise AssertionError(found)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_set_by_hand_is_used_or_refused(stage: int):
    def use(stage: int, backward: bool) -> tuple:
        model, optimizer = build(stage)
        if backward:
            model(torch.ones(2, WIDTH)).sum().backward()
        before = training.whole(model, optimizer)
        try:
            model.after.bias.grad = torch.full_like(before["after.bias"], 100.0)
            optimizer.step()
        except RuntimeError as error:
            return "refused", "grad" in str(error)
        found = optimizer.full_grads().get("after.bias", torch.zeros(1))
        return "used", bool((found == 100.0).all())

    for backward in (False, True):
        for found in on_two_ranks(use, stage, backward):
            assert found in (("used", True), ("refused", True)), backward


def train_with_a_view(stage: int, how: str) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
    for step in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 and how == "assigned":
            model[0].weight.data = model[0].weight.data.t()
        elif step == 0:
            with torch.no_grad():
                model[0].weight.t_()
    return "no error"


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("how", ["assigned", "in place"])
def test_a_view_that_begins_at_the_same_address_is_another_tensor(stage: int, how: str):
    """At stage 3 the parameter is freed: neither is possible outside full_params()."""
    with pytest.raises(zerolab.WorkerError, match=r"parameter 0\.weight was replaced after its Zero"):
        zerolab.launch(train_with_a_view, 2, stage, how, timeout=60)
