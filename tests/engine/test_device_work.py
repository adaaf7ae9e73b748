"""Promise: a step asks little of a GPU: few kernels, and no wait of the CPU but one to clip and one for fp16.

Counted on a stand-in (support/stand_in.py), so that this needs no GPU. The same is measured on a GPU by
tests/gpu.
"""

import sys
from collections.abc import Callable

import cloudpickle
import pytest
import torch
from support import hostile, stand_in, training
from support.hostile import hostile_backend
from support.stand_in import Counts, counting, tensors_of
from support.user_models import Net
from torch import nn

import zerolab
from zerolab.engine import Engine
from zerolab.precision import PRECISIONS

for module in (sys.modules[__name__], hostile, stand_in):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest

STAGES = (0, 1, 2, 3)
WARM_UP = 3


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def as_on_a_gpu() -> None:
    """The engine compares a unit's values in each step where they are on the CPU alone."""
    Engine._inspect_in_turn = lambda _: None


def count(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, clip: bool = False) -> Counts:
    """What one step asks of the device, after a few that set everything up."""
    scale = getattr(optimizer, "scale", lambda loss: loss)

    def step() -> None:
        scale(model(x).float().square().mean()).backward()
        if clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    with counting([x, *tensors_of(model, optimizer)]) as counts:
        step()
    return counts


def waits_of(settings: dict) -> list[dict[str, int]]:
    """On a rank: in which files the CPU would wait in a step, without clipping and with it."""
    as_on_a_gpu()
    found = []
    for clip in (False, True):
        with hostile_backend():
            model = Net()
            optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, lr=1e-3, **settings)
            found.append(count(model, optimizer, torch.ones(2, training.WIDTH), clip).waits_by_file())
            optimizer.engine.finish_gathers()
    return found


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("fused", [False, True])
def test_the_cpu_waits_once_to_clip_and_once_for_the_scale_of_fp16(stage: int, precision: str, fused: bool):
    settings = {"stage": stage, "precision": precision, "fused": fused}
    for plain, clipped in zerolab.launch(waits_of, 2, settings, backend="gloo", timeout=60):
        scale = {"zerolab/optimizer/loss_scale.py": 1} if precision == "mixed_fp16" else {}
        assert plain == scale
        assert clipped == scale | {"zerolab/optimizer/gradients.py": 1}


# Kernels.

UNITS, LINEARS, WIDTH = 24, 6, 16
FUSED_ADAMW = (torch.optim.AdamW, {"lr": 1e-3, "fused": True})
FOREACH_SGD = (torch.optim.SGD, {"lr": 1e-3, "foreach": True})


def model_of_288_parameters() -> nn.Module:
    linears = lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LINEARS)))
    return nn.Sequential(*(linears() for _ in range(UNITS)))


def kernels_over_plain(optimizer_class: type, flags: dict, cases: list[tuple[int, str]]) -> list[float]:
    """On a rank: the kernels of a step at each stage and precision, as a multiple of the plain loop's.

    The plain loop is in fp32. With one rank there are no messages in either.
    """
    as_on_a_gpu()
    x, model = torch.ones(2, WIDTH), model_of_288_parameters()
    plain = count(model, optimizer_class(model.parameters(), **flags), x).kernels.total()
    found = []
    for stage, precision in cases:
        model = model_of_288_parameters()
        with hostile_backend():
            optimizer = zerolab.ZeroOptimizer(
                model, optimizer_class, stage=stage, precision=precision, **flags
            )
        found.append(count(model, optimizer, x).kernels.total() / plain)
    return found


BOUNDS = {(2, "fp32"): 1.1, (3, "fp32"): 1.17, (2, "mixed"): 1.22, (3, "mixed"): 1.18}


@pytest.mark.parametrize("optimizer", [FUSED_ADAMW, FOREACH_SGD], ids=["fused AdamW", "foreach SGD"])
def test_kernels_of_a_step(optimizer: tuple):
    """At 288 parameters in 24 units. An H200 had 1.06 at stage 2 in fp32, and 1.27 in mixed precision."""
    (found,) = zerolab.launch(kernels_over_plain, 1, *optimizer, list(BOUNDS), backend="gloo", timeout=120)
    assert all(each <= bound for each, bound in zip(found, BOUNDS.values(), strict=True)), found


# The stand-in itself.


def look(work: Callable[[torch.Tensor], object]) -> tuple[int, int]:
    """The kernels and the waits of something that is done with a tensor on the stand-in."""
    tensor = torch.ones(64)
    with counting([tensor]) as counts:
        work(tensor)
    return counts.kernels.total(), counts.waits.total()


def empty(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(64, device=like.device)


DOES = {
    "a view and a slice": (lambda t: t.view(8, 8)[2:4].t(), 0, 0),
    "an addition in place": (lambda t: t.add_(1), 1, 0),
    "a buffer and a copy into it": (lambda t: empty(t).copy_(t), 1, 0),
    "a buffer of zeros": (lambda t: torch.zeros(64, device=t.device), 1, 0),
    "two operations, of which the second reads the first's result": (lambda t: (t * 2).sum(), 2, 0),
    "what the CPU keeps for itself": (lambda t: torch.zeros(64).add_(1).tolist(), 0, 0),
    "a number of the CPU's, handed to a kernel": (lambda t: t.mul_(torch.tensor(0.5)), 1, 0),
    "a foreach operation over 150 tensors": (lambda t: torch._foreach_add_([t] * 150, 1), 2, 0),
    "item": (lambda t: t[0].item(), 0, 1),
    "a condition": (lambda t: bool(t[0] > 0), 1, 1),
    "float": (lambda t: float(t.sum()), 1, 1),
    "cpu, and then whatever": (lambda t: t.cpu().sum().item(), 0, 1),
    "to the CPU by its name": (lambda t: t.to("cpu"), 0, 1),
    "tolist": (lambda t: t.tolist(), 0, 1),
    "a copy into a tensor of the CPU's": (lambda t: torch.ones(64).copy_(t), 1, 1),
    "values from the CPU": (lambda t: torch.tensor([1.0], device=t.device), 0, 1),
    "an index that is a mask": (lambda t: t[t > 0], 2, 1),
    "nonzero": (lambda t: t.nonzero(), 1, 1),
}


@pytest.mark.parametrize("name", DOES)
def test_the_stand_in_counts(name: str):
    work, kernels, waits = DOES[name]
    assert look(work) == (kernels, waits)


def test_the_stand_in_sees_what_hooks_do_in_backward():
    weight = nn.Parameter(torch.ones(4))

    def hook(parameter: nn.Parameter) -> None:
        empty(parameter)[:4].copy_(parameter.grad).sum().item()

    weight.register_post_accumulate_grad_hook(hook)
    with counting([weight]) as counts:
        (weight * 2).sum().backward()
    assert counts.waits.total() == 1
    assert [name for name, _ in counts.kernels].count("copy_") == 1
