"""Promise: ranks that load different optimizer states, or of which one loads none, do not update."""

import copy
from pathlib import Path

import pytest
import torch
from support import training
from support.trained import build, on_two_ranks, train, values_of
from torch import nn

import zerolab

AFTERWARDS = 3  # steps


def with_states(stage: int, loads: dict[int, list[int]]) -> str:
    """On a rank: train, load the states of these moments (0 or 1), train on; what the next update says."""
    model, optimizer = build(stage)
    moments = []
    for _ in range(2):
        train(model, optimizer)
        moments.append(copy.deepcopy(optimizer.state_dict()))
    for moment in loads.get(optimizer.rank, []):
        optimizer.load_state_dict(copy.deepcopy(moments[moment]))
    with optimizer.full_params():
        before = values_of(model)
    try:
        train(model, optimizer)
    except RuntimeError as error:
        optimizer.zero_grad()
        with optimizer.full_params():
            unchanged = all(before[name].equal(value) for name, value in values_of(model).items())
        optimizer.load_state_dict(moments[1])  # now on every rank, and training goes on
        train(model, optimizer, AFTERWARDS)
        return f"{error}; parameters unchanged: {unchanged}"
    return "trained"


@pytest.mark.parametrize("stage", range(4))
def test_a_state_that_one_rank_loads_alone_is_found(stage: int):
    for said in on_two_ranks(with_states, stage, {1: [0]}):
        assert "ranks disagree about the calls of optimizer.load_state_dict" in said
        assert "rank 0 has nothing, rank 1 has a" in said and said.endswith("parameters unchanged: True")


@pytest.mark.parametrize("stage", range(4))
def test_a_state_that_one_rank_loads_twice_is_found(stage: int):
    for said in on_two_ranks(with_states, stage, {0: [0], 1: [0, 0]}):
        assert "ranks disagree about the calls of optimizer.load_state_dict" in said


def test_states_that_differ_are_found_at_stage_0():
    for said in on_two_ranks(with_states, 0, {0: [0], 1: [1]}):
        assert "rank 0 has a state with the hash" in said and "rank 1 has a state with the hash" in said


def saved(path: Path, alone: bool) -> str:
    """On a rank: load a state, on rank 1 alone or on both, and save; the error, or the checkpoint."""
    model, optimizer = build(stage=2)
    train(model, optimizer)
    first = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer)
    if optimizer.rank == 1 or not alone:
        optimizer.load_state_dict(first)
    try:
        zerolab.save(optimizer, path)
    except RuntimeError as error:
        return f"{error}; saved: {list(path.glob('generation-*'))}"
    train(model, optimizer)  # the save has not used up what the update compares
    return (path / "LATEST").read_text().strip()


def test_parts_of_two_states_are_not_saved(tmp_path: Path):
    for said in on_two_ranks(saved, tmp_path / "alone", True):
        assert "ranks disagree about the calls of optimizer.load_state_dict" in said
        assert said.endswith("saved: []")
    for said in on_two_ranks(saved, tmp_path / "both", False):
        assert "generation-000001" in said


@pytest.mark.parametrize("stage", range(4))
def test_ranks_that_all_load_train_on(stage: int):
    assert on_two_ranks(with_states, stage, {0: [0, 1], 1: [0, 1]}) == ["trained"] * 2


class Few(nn.Module):
    """So few parameters that all of them are in the shard of one rank."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(training.WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class OneMatrix(nn.Module):
    """One matrix in one block, which one rank owns whole under Muon."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(training.WIDTH, 4, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)


def of_few(stage: int, optimizer_class: type | None) -> str:
    """On a rank: train a small model, load the state of an earlier moment, and train on."""
    settings = {} if optimizer_class is None else {"params": zerolab.matrices_by(optimizer_class)}
    model, optimizer = build(stage, Few if optimizer_class is None else OneMatrix, **settings)
    train(model, optimizer)
    first = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer)
    optimizer.load_state_dict(first)
    train(model, optimizer, AFTERWARDS)
    return "trained"


@pytest.mark.parametrize("optimizer_class", [None, torch.optim.Muon], ids=["cut", "whole"])
@pytest.mark.parametrize("stage", range(4))
def test_states_that_one_rank_owns_whole_are_loaded(stage: int, optimizer_class: type | None):
    assert on_two_ranks(of_few, stage, optimizer_class) == ["trained"] * 2
