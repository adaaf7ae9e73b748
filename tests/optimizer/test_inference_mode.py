"""Promise: nothing that training needs later is made inside torch.inference_mode(): that is refused.

A tensor made there can never be updated outside. PyTorch says so only when it is, one step later.
"""

import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from support.numbered import outcome
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

REFUSED = "RuntimeError: {} inside torch.inference_mode(): "
WAY_OUT = "with torch.no_grad() in its place nothing changes for training"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def trained(stage: int) -> zerolab.ZeroOptimizer:
    optimizer = zerolab.ZeroOptimizer(nn.Linear(4, 4), torch.optim.Adam, stage=stage, lr=0.01)
    train(optimizer)
    return optimizer


def train(optimizer: zerolab.ZeroOptimizer) -> None:
    optimizer.zero_grad()
    optimizer.model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()


def all_ways(stage: int, folder: Path) -> dict[str, str]:
    """On a rank: what each call inside inference_mode() says, and what a step outside it says afterwards."""
    said = {}
    optimizer, model = trained(stage), nn.Linear(4, 4)
    zerolab.save(optimizer, folder)
    optimizer.model(torch.ones(2, 4)).square().sum().backward()
    with torch.inference_mode():
        said["ZeroOptimizer() is called"] = outcome(
            lambda: zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=stage)
        )
        said["step() is called"] = outcome(optimizer.step)
        said["load_state_dict() is called"] = outcome(
            lambda: optimizer.load_state_dict(optimizer.state_dict())
        )
        said["load() is called"] = outcome(lambda: zerolab.load(optimizer, folder))
    outside = [
        outcome(lambda: train(optimizer)),
        outcome(lambda: zerolab.ZeroOptimizer(model, torch.optim.Adam)),
    ]
    return said | {"outside": ", ".join(outside)}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_makes_tensors_that_are_updated_later_is_refused(stage: int, tmp_path: Path):
    for said in zerolab.launch(all_ways, 2, stage, tmp_path, timeout=60):
        assert said.pop("outside") == "done, done"
        assert len(said) == 4
        for call, error in said.items():
            assert error.startswith(REFUSED.format(call)) and error.endswith(WAY_OUT), error


def evaluated(stage: int) -> bool:
    """On a rank: an evaluation and a clip inside inference_mode(), and a step after each."""
    optimizer = trained(stage)
    for inside in (
        lambda: optimizer.model(torch.ones(2, 4)),
        lambda: optimizer.clip_grad_norm_(1.0),
    ):
        optimizer.model(torch.ones(2, 4)).square().sum().backward()
        with torch.inference_mode():
            inside()
        train(optimizer)
    return True


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_evaluation_there_is_no_reason_to_refuse(stage: int):
    assert all(zerolab.launch(evaluated, 2, stage, timeout=60))
