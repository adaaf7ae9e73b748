"""Promise: saving, exporting and loading refuse a model whose tensors are not those that train."""

import sys
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
import torch
from support.numbered import outcome
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

REPLACED = "RuntimeError: parameter 0.weight was replaced after its ZeroOptimizer was built"
CHANGES: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "data": (lambda model: setattr(model[0].weight, "data", torch.ones(4, 4)), REPLACED),
    "vector": (
        lambda model: nn.utils.vector_to_parameters(torch.ones(40), model.parameters()),
        REPLACED,
    ),
    "assign": (
        lambda model: model.load_state_dict(
            {name: torch.ones(value.shape) for name, value in model.state_dict().items()}, assign=True
        ),
        REPLACED,
    ),
    "replaced module": (
        lambda model: model.__setitem__(1, nn.Linear(4, 4)),
        "RuntimeError: module 1 was replaced or removed after its ZeroOptimizer was built",
    ),
    "added module": (
        lambda model: model.append(nn.Linear(4, 2)),
        "RuntimeError: 2.weight, 2.bias came into the model after the ZeroOptimizer was built",
    ),
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def built(stage: int) -> zerolab.ZeroOptimizer:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=stage)


def use_after(stage: int, change: str, folder: Path) -> dict[str, str]:
    """On a rank: what the calls say after such a change of the model."""
    optimizer = built(stage)
    zerolab.save(optimizer, folder / "good")
    CHANGES[change][0](optimizer.model)
    return {
        "save": outcome(lambda: zerolab.save(optimizer, folder / "new")),
        "export": outcome(lambda: zerolab.export(optimizer, folder / "model.pt")),
        "load": outcome(lambda: zerolab.load(optimizer, folder / "good")),
    }


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stage", [0, 2])
def test_it_is_refused_by_name_and_nothing_is_written(stage: int, change: str, tmp_path: Path):
    for said in zerolab.launch(use_after, 2, stage, change, tmp_path, timeout=60):
        assert all(each.startswith(CHANGES[change][1]) for each in said.values()), said
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


def test_so_is_an_added_module_at_stage_3(tmp_path: Path):
    for said in zerolab.launch(use_after, 2, 3, "added module", tmp_path, timeout=60):
        assert all(each.startswith(CHANGES["added module"][1]) for each in said.values()), said


def thawed(folder: Path) -> list[str]:
    """On a rank: a frozen parameter that requires a gradient after the training is saved as any other."""
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam)
    model.requires_grad_(True)
    return [
        outcome(lambda: zerolab.save(optimizer, folder / "saved")),
        outcome(lambda: zerolab.export(optimizer, folder / "model.pt")),
        outcome(lambda: zerolab.load(optimizer, folder / "saved")),
    ]


def test_a_model_that_requires_gradients_again_is_saved(tmp_path: Path):
    assert zerolab.launch(thawed, 2, tmp_path, timeout=60) == [["done"] * 3] * 2
