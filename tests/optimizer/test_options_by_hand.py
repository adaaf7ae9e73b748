"""Promise: options that are changed by hand, in whatever way, count from the next step on, as in PyTorch."""

import sys

import cloudpickle
import pytest
import torch
from support.beside_plain import BATCH, Make, differing
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


def through_data(lr: torch.Tensor) -> None:
    lr.data.fill_(0.01)


def through_numpy(lr: torch.Tensor) -> None:
    lr.numpy()[...] = 0.01


def in_inference_mode(lr: torch.Tensor) -> None:
    with torch.inference_mode():
        lr.fill_(0.01)


def train(make: Make, write) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = make(model, torch.optim.Adam, lr=torch.tensor(0.1), foreach=False)
    for step in range(3):
        model(BATCH).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            write(optimizer.param_groups[0]["lr"])
    return model


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("write", [through_data, through_numpy, in_inference_mode])
def test_an_lr_tensor_that_is_written_to(write, stage: int):
    assert differing(lambda make: train(make, write), stage) == set()


def a_group_after_the_defaults_changed(make: Make, lr: float | None) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = make(model, torch.optim.AdamW, lr=0.1, params=list(model[0].parameters()))
    optimizer.defaults["lr"] = 0.01
    optimizer.defaults["weight_decay"] = 0.5
    own = {} if lr is None else {"lr": lr}
    optimizer.add_param_group({"params": list(model[2].parameters()), **own})
    for _ in range(3):
        model(BATCH).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("lr", [None, 0.03])
def test_a_new_group_has_the_defaults_as_they_are_now(lr: float | None, stage: int):
    assert differing(lambda make: a_group_after_the_defaults_changed(make, lr), stage) == set()


CALLS: list[str] = []


def with_hooks_on_all_optimizers(make: Make) -> nn.Module:
    """Hooks on every optimizer's step halve the rate, before it and after it."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def halve(optimizer, args, kwargs):
        CALLS.append(type(optimizer).__name__)
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    before, after = register_optimizer_step_pre_hook(halve), register_optimizer_step_post_hook(halve)
    try:
        optimizer = make(model, torch.optim.SGD, lr=0.1, momentum=0.9)
        for _ in range(3):
            model(BATCH).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        before.remove()
        after.remove()
    kind = type(optimizer).__name__
    assert [kind] * 6 == CALLS, CALLS
    CALLS.clear()
    return model


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_hooks_on_all_optimizers_run_once_a_step(stage: int):
    assert differing(with_hooks_on_all_optimizers, stage) == set()
