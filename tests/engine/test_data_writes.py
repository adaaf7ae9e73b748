"""Promise: a write through ``.data``, which no version counter shows, is kept, or found after some steps."""

import sys

import cloudpickle
import pytest
import torch
from support.trained import on_two_ranks
from torch import nn

import zerolab
from zerolab.unit import FlatUnit

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

UNITS = 3


class Writing(nn.Linear):
    """A layer whose forward writes to its own weight through ``.data``."""

    writing = False

    def forward(self, x):
        if self.writing:
            self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


def build(stage: int, **settings) -> zerolab.ZeroOptimizer:
    torch.manual_seed(0)
    model = nn.Sequential(*(Writing(8, 8) for _ in range(UNITS)))
    return zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1, **settings)


def train(optimizer: zerolab.ZeroOptimizer, steps: int) -> tuple[int, str]:
    """How many steps went well, and what was said of the next."""
    for step in range(steps):
        try:
            optimizer.model(torch.randn(3, 8)).square().mean().backward()
            optimizer.step()
        except RuntimeError as error:
            return step, str(error)
        optimizer.zero_grad()
    return steps, "accepted"


def write_in_forward(layer: int) -> tuple[int, str]:
    optimizer = build(3)
    train(optimizer, 2)
    optimizer.model[layer].writing = True
    return train(optimizer, 2 * UNITS)


@pytest.mark.parametrize("layer", range(UNITS))
def test_a_forward_that_writes_at_stage_3_is_refused_after_as_many_steps_as_units(layer: int):
    for steps, said in on_two_ranks(write_in_forward, layer):
        assert steps < UNITS and f"a parameter of unit {layer} was written to while it was gathered" in said


def write_between_steps(stage: int, lasting: bool, precision: str) -> tuple[int, str]:
    """Rank 1 alone writes to the last layer, once or before every step."""
    optimizer = build(stage, precision=precision)
    train(optimizer, 1)
    for step in range(2 * UNITS):
        if optimizer.rank == 1 and (lasting or step == 0):
            optimizer.model[UNITS - 1].bias.data.add_(0.5)
        done, said = train(optimizer, 1)
        if not done:
            return step, said
    return 2 * UNITS, "accepted"


@pytest.mark.parametrize("precision", ["fp32", "mixed"])
@pytest.mark.parametrize("stage, lasting", [(0, False), (0, True), (1, True), (2, True)])
def test_values_that_differ_by_rank_are_found_after_as_many_steps_as_units(
    stage: int, lasting: bool, precision: str
):
    for steps, said in on_two_ranks(write_between_steps, stage, lasting, precision):
        assert steps < UNITS and f"has unit {UNITS - 1}, checksum" in said and "on every rank" in said


def write_the_same(stage: int) -> tuple[int, str]:
    optimizer = build(stage)
    for _ in range(2 * UNITS):
        if stage < 3:
            optimizer.model[0].weight.data.mul_(0.9)
        with optimizer.full_params():
            optimizer.model[1].weight.data.mul_(0.9)
        with optimizer.full_params(from_rank=0):
            optimizer.model[2].weight.data.mul_(0.9 + 0.1 * optimizer.rank)
        done, said = train(optimizer, 1)
        if not done:
            return done, said
    return 1, "accepted"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_same_values_on_every_rank_are_kept(stage: int):
    assert on_two_ranks(write_the_same, stage) == [(1, "accepted")] * 2


def count_checksums(stage: int) -> list[int]:
    """How many times a unit's values are read in each step."""
    optimizer, counts = build(stage), []
    plain = FlatUnit.checksum
    FlatUnit.checksum = lambda unit: counts.append(unit) or plain(unit)
    found = []
    for _ in range(2 * UNITS):
        counts.clear()
        train(optimizer, 1)
        found.append(len(counts))
    return found


@pytest.mark.parametrize("stage, reads", [(0, 1), (2, 1), (3, 2)])
def test_no_step_reads_more_than_one_unit(stage: int, reads: int):
    for found in on_two_ranks(count_checksums, stage):
        assert found[1:] == [reads] * (2 * UNITS - 1)


@pytest.mark.parametrize("stage, reads", [(0, 0), (2, 0), (3, 2)])
def test_one_rank_alone_has_nothing_to_compare_below_stage_3(stage: int, reads: int):
    (found,) = zerolab.launch(count_checksums, 1, stage, timeout=60)
    assert found[1:] == [reads] * (2 * UNITS - 1)


class Rooted(nn.Module):
    """Parameters of the root before and after three units."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(UNITS))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def write_once_after_a_forward(backward_follows: bool) -> str:
    torch.manual_seed(0)
    model = Rooted()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.1)
    train(optimizer, 1)
    try:
        loss = model(torch.randn(3, 8)).square().mean()
        model.last.weight.data.clamp_(-0.1, 0.1)
        (loss if backward_follows else model(torch.randn(3, 8)).square().mean()).backward()
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("backward_follows", [False, True])
def test_one_write_to_the_root_while_it_is_whole_is_refused(backward_follows: bool):
    for said in on_two_ranks(write_once_after_a_forward, backward_follows):
        assert "a parameter of unit root was written to while it was gathered" in said


class FromFirstBatch(nn.Linear):
    """A layer that initializes its bias from the first batch, as an ActNorm does."""

    initialized = False

    def forward(self, x):
        if not self.initialized:
            self.bias.data.copy_(-super().forward(x).mean(0))
            self.initialized = True
        return super().forward(x)


def initialize_in_forward(stage: int, layer: int, same: bool) -> str:
    torch.manual_seed(0)
    layers = [FromFirstBatch(8, 8) if at == layer else nn.Linear(8, 8) for at in range(UNITS)]
    optimizer = zerolab.ZeroOptimizer(nn.Sequential(*layers), torch.optim.SGD, stage=stage, lr=0.1)
    torch.manual_seed(0 if same else optimizer.rank)
    return train(optimizer, 1)[1]


@pytest.mark.parametrize("layer", range(UNITS))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_initialized_from_each_ranks_first_batch_are_refused_at_once(stage: int, layer: int):
    for said in on_two_ranks(initialize_in_forward, stage, layer, False):
        lost = f"a parameter of unit {layer} was written to while it was gathered"
        assert (lost if stage == 3 else f"has unit {layer}, checksum") in said


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weights_initialized_from_the_same_batch_are_kept_below_stage_3(stage: int):
    assert on_two_ranks(initialize_in_forward, stage, 0, True) == ["accepted"] * 2
