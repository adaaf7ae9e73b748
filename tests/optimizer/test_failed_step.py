"""Promise: after a step that failed in the middle nothing goes on with parameters updated in part."""

import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from support.beside_plain import BATCH, values
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


def make(stage: int) -> tuple[nn.Module, zerolab.ZeroOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    return model, zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=stage, lr=0.1)


def backward(model: nn.Module, factor: float = 1.0) -> None:
    model(factor * BATCH).pow(2).sum().backward()


def fail(model: nn.Module, optimizer: zerolab.ZeroOptimizer) -> None:
    """A step in whose update torch raises: amsgrad needs a state that these parameters have not."""
    backward(model)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(KeyError):
        optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = False


def said(action) -> str:
    try:
        action()
        return ""
    except RuntimeError as error:
        return str(error)


def after_a_failure(stage: int, folder: Path) -> list[str]:
    """On a rank: what each action says after the failure."""
    model, optimizer = make(stage)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    fail(model, optimizer)
    optimizer.zero_grad()
    backward(model)
    return [
        said(optimizer.step),
        said(lambda: optimizer.clip_grad_norm_(1.0)),
        said(lambda: zerolab.save(optimizer, folder / "run")),
        said(lambda: zerolab.export(optimizer, folder / "model.pt")),
    ]


@pytest.mark.parametrize("stage", range(4))
def test_nothing_goes_on_and_nothing_is_written(stage: int, tmp_path: Path):
    for found in zerolab.launch(after_a_failure, 2, stage, tmp_path, timeout=60):
        for each in found:
            assert "an earlier step() failed" in each and "KeyError" in each and "zerolab.load" in each
    assert list(tmp_path.iterdir()) == []


def go_on(stage: int, folder: Path, failing: bool) -> dict[str, torch.Tensor]:
    """On a rank: save, perhaps fail in a step, load, and train on with a layer frozen."""
    model, optimizer = make(stage)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    zerolab.save(optimizer, folder)
    if failing:
        fail(model, optimizer)
    zerolab.load(optimizer, folder)
    model[0].requires_grad_(False)  # a gradient that the failed step left behind would train it
    for factor in (2.0, 3.0):
        backward(model, factor)
        optimizer.step()
        optimizer.zero_grad()
    with optimizer.full_params():
        return values(model)


@pytest.mark.parametrize("stage", range(4))
def test_a_load_starts_anew(stage: int, tmp_path: Path):
    runs = [zerolab.launch(go_on, 2, stage, tmp_path / str(failing), failing) for failing in (True, False)]
    for failed, right in zip(*runs, strict=True):
        assert [name for name in right if not torch.equal(failed[name], right[name])] == []


def test_a_step_that_was_refused_before_it_began_is_no_failed_update():
    def refused(stage: int) -> str:
        model, optimizer = make(stage)
        with torch.inference_mode():
            first = said(optimizer.step)
        backward(model)
        optimizer.step()
        return first

    assert all("inference_mode" in each for each in zerolab.launch(refused, 2, 1, timeout=60))
