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
from torch.utils._python_dispatch import TorchDispatchMode

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


@pytest.mark.parametrize("stage", [0, 3])
def test_every_use_of_a_reduced_gradient_is_an_error_that_says_how(stage: int):
    def use(stage: int) -> list[str]:
        model, _ = build(stage)
        model(torch.ones(2, WIDTH)).sum().backward()

        def add_as_autograd_does() -> None:
            with torch._C.DisableTorchFunctionSubclass():
                model.before.weight.grad.add_(torch.ones(WIDTH, WIDTH))

        uses = {
            "add_": add_as_autograd_does,
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


def train_dropping(stage: int | None, micro_batches: int) -> list[torch.Tensor]:
    """A hook of the user's, from before the optimizer, removes the bias's gradient in the second step.

    Of two micro-batches it removes that of the second, and with it the sum of both.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    passes = []
    last_of_second_step = 2 * micro_batches - 1
    model[0].bias.register_post_accumulate_grad_hook(
        lambda p: drop(p) if len(passes) == last_of_second_step else None
    )
    keywords = {"lr": 0.1, "momentum": 0.9}
    if stage is None:
        optimizer = torch.optim.SGD(model.parameters(), **keywords)
    else:
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, **keywords)
    for step in range(3):
        for _ in range(micro_batches):
            model(torch.full((3, WIDTH), 0.5 + step)).square().mean().backward()
            passes.append(step)
        optimizer.step()
        optimizer.zero_grad()
    with contextlib.nullcontext() if stage is None else optimizer.full_params():
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_hook_that_removes_a_gradient_leaves_the_parameter_alone_as_in_torch(
    stage: int, micro_batches: int
):
    (plain,) = zerolab.launch(train_dropping, 1, None, micro_batches, timeout=60)
    for found in on_two_ranks(train_dropping, stage, micro_batches):
        assert all(map(torch.equal, found, plain))


class Shared(nn.Module):
    """Autograd gives ``bias`` and ``bent`` one gradient, and a hook changes it when the bias has had it."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(WIDTH))
        self.slope = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        bent = self.slope * x
        bent.register_hook(lambda gradient: gradient.mul_(3))
        return (self.bias + bent).square().mean()


def train_sharing(stage: int | None) -> list[torch.Tensor]:
    model = Shared()
    if stage is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, units=[], lr=0.1)
    for _ in range(2):
        model(torch.full((WIDTH,), 0.5)).backward()
    optimizer.step()
    with contextlib.nullcontext() if stage is None else optimizer.full_params():
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gradient_that_a_hook_changes_after_it_was_accumulated_counts_as_it_came(stage: int):
    (plain,) = zerolab.launch(train_sharing, 1, None, timeout=60)
    for found in on_two_ranks(train_sharing, stage):
        assert all(map(torch.equal, found, plain))


def replace(parameter: nn.Parameter) -> None:
    parameter.grad = torch.full_like(parameter, 0.25)


def remove_before(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    parameter.grad = None


def train_hooked(stage: int | None, how: str) -> list[torch.Tensor]:
    """Three micro-batches. In the second one something happens to the weight's gradient, the same on all."""
    torch.manual_seed(0)
    model, happens = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)), []
    for weight in (model[0].weight, model[1].weight):  # one of them is the first in a backward pass
        if how == "replaced":
            weight.register_post_accumulate_grad_hook(lambda p: replace(p) if happens else None)
        if how == "removed before":
            weight.register_hook(lambda g, weight=weight: remove_before(weight, g) if happens else None)
    if stage is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, units=[], lr=0.1)
    for micro_batch in range(3):
        happens[:] = [micro_batch] if micro_batch == 1 else []
        loss = model(torch.full((3, WIDTH), 0.5 + micro_batch)).square().mean()
        loss.backward(create_graph=how == "kept with its graph" and bool(happens))
    optimizer.step()
    with contextlib.nullcontext() if stage is None else optimizer.full_params():
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("how", ["replaced", "removed before", "kept with its graph"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_happens_to_a_sum_of_micro_batches_happens_as_in_torch(stage: int, how: str):
    (plain,) = zerolab.launch(train_hooked, 1, None, how, timeout=60)
    for found in on_two_ranks(train_hooked, stage, how):
        assert all(map(torch.equal, found, plain))


def halve(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(0.5)


def halve_the_sum(stage: int) -> str:
    """In PyTorch such a hook halves the sum of both micro-batches. The engine has the first elsewhere."""
    model = nn.Linear(WIDTH, 2)
    model.bias.register_post_accumulate_grad_hook(halve)
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, units=[], lr=0.1)
    model(torch.ones(1, WIDTH)).sum().backward()
    try:
        model(torch.ones(1, WIDTH)).sum().backward()
    except RuntimeError as error:
        optimizer.zero_grad()
        return str(error)
    return "accepted"


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_hook_that_changes_the_sum_of_micro_batches_is_refused(stage: int):
    for said in on_two_ranks(halve_the_sum, stage):
        assert "moved into the optimizer's flat buffer" in said


def train_under_a_mode(stage: int, mode: type | None) -> list[torch.Tensor]:
    """Two micro-batches under a mode that calls every operation of autograd again, as a FLOP counter does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, units=[], lr=0.1)
    with contextlib.nullcontext() if mode is None else mode():
        for _ in range(2):
            model(torch.full((3, WIDTH), 0.5)).square().mean().backward()
    optimizer.step()
    with optimizer.full_params():
        return [p.detach().clone() for p in model.parameters()]


class CallsAgain(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_micro_batches_add_up_under_a_dispatch_mode(stage: int):
    expected = on_two_ranks(train_under_a_mode, stage, None)
    for found, plain in zip(on_two_ranks(train_under_a_mode, stage, CallsAgain), expected, strict=True):
        assert all(map(torch.equal, found, plain))
