"""Promise: a class that does more than update its parameters in step() is refused, or gets what it needs."""

import sys
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerolab
from zerolab.optimizer.probe import Kind, verdict_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Plain(torch.optim.Optimizer):
    """SGD by hand, in which a subclass changes one thing."""

    def __init__(self, params, lr=0.1, **others):
        super().__init__(params, {"lr": lr} | others)

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)

    def update(self, parameter, group):
        parameter.data.add_(parameter.grad, alpha=-group["lr"])


class Assigns(Plain):
    def update(self, parameter, group):
        parameter.data = parameter.data - group["lr"] * parameter.grad


class Flattens(Plain):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data.clone()


class InBackward(Plain):
    """It updates each parameter when its gradient is there, as optimizers do that save gradients."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        for parameter in self.param_groups[0]["params"]:
            parameter.register_post_accumulate_grad_hook(lambda p: p.data.add_(p.grad, alpha=-lr))

    def step(self, closure=None):
        pass


class ClearsItself(Plain):
    def zero_grad(self, set_to_none=True):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.mul_(0.9)
        super().zero_grad(set_to_none)


class ReadsNames(Plain):
    def update(self, parameter, group):
        if not any(name.endswith("bias") for name in group.get("param_names", ())):
            super().update(parameter, group)


class Sends(Plain):
    def update(self, parameter, group):
        dist.all_reduce(parameter.grad)
        super().update(parameter, group)


class SkipsNotFinite(Plain):
    def update(self, parameter, group):
        if parameter.grad.isfinite().all():
            super().update(parameter, group)


class SkipsZero(Plain):
    """With a decay, which elements without a gradient have too."""

    def update(self, parameter, group):
        if parameter.grad.any():
            parameter.data.mul_(0.9)
            super().update(parameter, group)


class Lookahead(Plain):
    """It calls the closure again where the step has led."""

    def step(self, closure=None):
        super().step()
        if closure is not None:
            with torch.enable_grad():
                closure()
                return closure()


class CallsOnce(Plain):
    def step(self, closure=None):
        loss = None if closure is None else closure()
        super().step()
        return loss


class OwnRate(Plain):
    """It reads a factor of each parameter."""

    def update(self, parameter, group):
        parameter.data.add_(parameter.grad, alpha=-group["lr"] * getattr(parameter, "lr_scale", 1.0))


class Warm(Plain):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        self.factor = 1.0

    def update(self, parameter, group):
        parameter.data.add_(parameter.grad, alpha=-group["lr"] * self.factor)


@pytest.mark.parametrize(
    "of_class, reason",
    [
        (Assigns, "it gives a parameter other memory, as `p.data = ...` does"),
        (Flattens, "it gives a parameter other memory, as `p.data = ...` does"),
        (InBackward, "it registers hooks on its parameters"),
        (ClearsItself, "it overrides zero_grad, which ZeroOptimizer.zero_grad does not call"),
        (ReadsNames, "it reads the names of its parameters, and slices have none"),
    ],
)
def test_what_slices_cannot_give_a_class_is_refused(of_class: type, reason: str):
    verdict = verdict_of(of_class, {})
    assert verdict.refusal.startswith(f"{of_class.__name__} cannot be sharded: {reason}"), verdict
    assert verdict.refusal.endswith("or pass another class") or "pass another one" in verdict.refusal


def refused_collective() -> str:
    with pytest.raises(
        ValueError, match=r"Sends cannot be sharded: it calls a collective \(allreduce_\)"
    ) as it:
        zerolab.ZeroOptimizer(nn.Linear(2, 2), Sends)
    return str(it.value)


def test_a_collective_in_a_step_is_refused_and_not_sent():
    """Ranks have different slices, so the sum would be one of different parameters."""
    said = zerolab.launch(refused_collective, 2, timeout=60)
    assert said[0] == said[1]


@pytest.mark.parametrize("of_class", [SkipsNotFinite, SkipsZero])
def test_a_class_that_looks_whether_a_gradient_is_usable_keeps_parameters_whole(of_class: type):
    assert verdict_of(of_class, {}).kind is Kind.BY_PARAMETER
    assert verdict_of(Plain, {}).kind is Kind.ELEMENTWISE


def step_with_closure(of_class: type) -> str:
    model = nn.Linear(2, 2)
    optimizer = zerolab.ZeroOptimizer(model, of_class)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    try:
        return f"{optimizer.step(closure).item() == closure().item()}"
    except ValueError as error:
        return str(error)


def test_a_class_that_calls_a_closure_other_than_once_is_refused_with_one():
    (said,) = zerolab.launch(step_with_closure, 1, Lookahead, timeout=60)
    assert said.startswith(
        "Lookahead cannot be stepped with a closure: it calls the closure 2 times in a step"
    )
    assert "step() without a closure" in said
    for of_class in (CallsOnce, torch.optim.SGD):
        assert zerolab.launch(step_with_closure, 1, of_class, timeout=60) == ["False"]


def set_attributes() -> list[str]:
    optimizer, said = zerolab.ZeroOptimizer(nn.Linear(2, 2), Warm), []
    for name in ("factor", "update"):
        try:
            setattr(optimizer, name, 0.5)
        except RuntimeError as error:
            said.append(str(error))
    optimizer.mine, optimizer._own, optimizer.step = 1, 2, optimizer.step  # as schedulers wrap it
    return said


def test_setting_what_only_the_class_has_is_refused():
    (said,) = zerolab.launch(set_attributes, 1, timeout=60)
    assert [each.partition(",")[0] for each in said] == [
        "setting Warm.factor has no effect",
        "setting Warm.update has no effect",
    ]


def refused_keywords() -> list[str]:
    said, model = [], nn.Linear(2, 2)
    for value in (SimpleNamespace(rate=1.0), {"a", "b"}, model):
        try:
            zerolab.ZeroOptimizer(model, Plain, own=value)
        except TypeError as error:
            said.append(str(error))
    return said


def test_a_keyword_that_is_an_object_is_refused_because_its_copies_would_not_change():
    (said,) = zerolab.launch(refused_keywords, 1, timeout=60)
    assert [each.partition(".")[0] for each in said] == [
        f"the keyword own is a {name}" for name in ("SimpleNamespace", "set", "Linear")
    ]


def model_with_rates() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    model[0].weight.lr_scale = 0.25
    return model


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.linspace(-1, 1, 20).view(4, 5)).square().mean()


def rates_in_a_process() -> list[torch.Tensor]:
    model = model_with_rates()
    optimizer = OwnRate(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def rates_on_a_rank(stage: int) -> list[torch.Tensor]:
    model = model_with_rates()
    optimizer = zerolab.ZeroOptimizer(model, OwnRate, stage=stage)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    with optimizer.full_params():
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_class_finds_the_attributes_of_its_parameters(stage: int):
    """Both ranks have one batch, so the mean of two is that of one process."""
    (expected,) = zerolab.launch(rates_in_a_process, 1, timeout=60)
    for found in zerolab.launch(rates_on_a_rank, 2, stage, timeout=60):
        assert all(map(torch.equal, expected, found))


class OnASphere(nn.Parameter):
    """As libraries of optimizers on manifolds mark a parameter."""


def odd_parameters() -> list[str]:
    said = []
    for odd in ("class", "mask"):
        model = nn.Linear(2, 2)
        if odd == "class":
            model.weight = OnASphere(model.weight.detach())
        else:
            model.weight.mask = torch.ones(2, 2)
        try:
            zerolab.ZeroOptimizer(model, OwnRate)
        except ValueError as error:
            said.append(str(error))
        zerolab.ZeroOptimizer(model, torch.optim.SGD)  # torch's classes read neither
    return said


def test_what_a_class_may_read_of_a_parameter_and_slices_have_not_is_refused():
    (said,) = zerolab.launch(odd_parameters, 1, timeout=60)
    assert [each.partition(",")[0] for each in said] == [
        "a parameter is a OnASphere",
        "a parameter has the attribute mask",
    ]


def names_in_groups() -> list[list[str]]:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    ours = zerolab.ZeroOptimizer(model, torch.optim.SGD, params=model.named_parameters(), lr=0.1)
    torchs = torch.optim.SGD(other.named_parameters(), lr=0.1)
    return [each.param_groups[0]["param_names"] for each in (ours, torchs)]


def test_named_parameters_give_a_group_their_names_as_in_torch():
    ((ours, torchs),) = zerolab.launch(names_in_groups, 1, timeout=60)
    assert ours == torchs == ["weight", "bias"]
