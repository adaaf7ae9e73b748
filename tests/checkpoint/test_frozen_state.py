"""Promise: a load that drops the optimizer state of frozen parameters says so, with the way to keep it."""

import sys
import warnings
from pathlib import Path

import cloudpickle
import pytest
import torch
from support.beside_plain import BATCH, values
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


def train(stage: int, freeze: str, **folders: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """On a rank: load, train, save. Returns the parameters, and what was warned about."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    if freeze == "before":
        model[0].requires_grad_(False)
    optimizer = zerolab.ZeroOptimizer(
        model, torch.optim.Adam, stage=stage, params=list(model.parameters()), lr=0.1
    )
    if freeze == "after":
        model[0].requires_grad_(False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if "load" in folders:
            zerolab.load(optimizer, folders["load"])
    for _ in range(2):
        model(BATCH).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    zerolab.save(optimizer, folders["save"])
    with optimizer.full_params():
        return values(model), [str(each.message) for each in said]


def in_plain_torch() -> dict[str, torch.Tensor]:
    """Two steps of all parameters, two of the head alone, two of all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(6):
        model[0].requires_grad_(step not in (2, 3))
        model(BATCH).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def three_runs(stage: int, freeze: str, folder: Path):
    zerolab.launch(train, 2, stage, "never", save=folder / "1")
    middle = zerolab.launch(train, 2, stage, freeze, load=folder / "1", save=folder / "2")
    return middle, zerolab.launch(train, 2, stage, "never", load=folder / "2", save=folder / "3")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_state_of_what_was_frozen_before_is_dropped_with_a_warning_of_rank_0(stage: int, tmp_path: Path):
    ((_, said), (_, others)), _ = three_runs(stage, "before", tmp_path)
    (line,) = said
    assert "state of 2 parameters" in line and "0.weight" in line and "freeze them afterwards" in line
    assert others == []


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_is_frozen_afterwards_keeps_its_state(stage: int, tmp_path: Path):
    middle, last = three_runs(stage, "after", tmp_path)
    expected = in_plain_torch()
    for found, _ in last:
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert [said for _, said in [*middle, *last]] == [[], [], [], []]
