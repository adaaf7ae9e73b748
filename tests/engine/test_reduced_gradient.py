"""Promise: every use of a gradient that is in the flat buffer is an error that says how to do it instead."""

import contextlib
import copy
import io
import pickle
import sys

import cloudpickle
import pytest
import torch
from support.trained import build, on_two_ranks
from support.training import WIDTH
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


@pytest.mark.parametrize("stage", [0, 3])
def test_every_use_of_a_reduced_gradient_is_an_error_that_says_how(stage: int):
    def use(stage: int) -> list[str]:
        model, _ = build(stage)
        model(torch.ones(2, WIDTH)).sum().backward()
        uses = {
            "clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            "clip_grad_value_": lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
            "get_total_norm": lambda: nn.utils.get_total_norm([p.grad for p in model.parameters()]),
            "norm": lambda: model.before.weight.grad.norm(),
            "scale": lambda: model.before.weight.grad.mul_(0.5),
            "zero_": lambda: model.before.weight.grad.zero_(),
            "clone": lambda: model.before.weight.grad.clone(),
            "numpy": lambda: model.before.weight.grad.numpy(),
            "item": lambda: model.before.weight.grad.sum().item(),
            "index": lambda: model.before.weight.grad[0, 0],
            "deepcopy": lambda: copy.deepcopy(model.before.weight.grad),
            "pickle": lambda: pickle.dumps(model.before.weight.grad),
            "save": lambda: torch.save(model.before.weight.grad, io.BytesIO()),
            "zero_grad": lambda: model.zero_grad(set_to_none=False),
        }
        wrong = []
        for what, do in uses.items():
            print(what, flush=True)
            try:
                do()
                wrong.append(f"{what}: no error")
            except RuntimeError as error:
                if "optimizer." not in str(error):
                    wrong.append(f"{what}: {error}")
        grad = model.before.weight.grad
        assert (
            grad.shape == model.before.weight.shape and grad.numel() == WIDTH**2 and "Reduced" in repr(grad)
        )
        return wrong

    for wrong in on_two_ranks(use, stage):
        assert wrong == []


def drop(parameter: nn.Parameter) -> None:
    parameter.grad = None


def train_dropping(stage: int | None) -> list[torch.Tensor]:
    """A hook of the user's, from before the optimizer, removes the bias's gradient in the second step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    steps = []
    model[0].bias.register_post_accumulate_grad_hook(lambda p: drop(p) if len(steps) == 1 else None)
    keywords = {"lr": 0.1, "momentum": 0.9}
    if stage is None:
        optimizer = torch.optim.SGD(model.parameters(), **keywords)
    else:
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, **keywords)
    for step in range(3):
        model(torch.full((3, WIDTH), 0.5 + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(step)
    with contextlib.nullcontext() if stage is None else optimizer.full_params():
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_hook_that_removes_a_gradient_leaves_the_parameter_alone_as_in_torch(stage: int):
    (plain,) = zerolab.launch(train_dropping, 1, None, timeout=60)
    for found in on_two_ranks(train_dropping, stage):
        assert all(map(torch.equal, found, plain))
