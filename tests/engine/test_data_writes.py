"""Promise: a write through ``.data`` is kept or refused as any other. One without PyTorch is found."""

import copy
import ctypes
import io
import sys

import cloudpickle
import numpy as np
import pytest
import torch
from support.trained import on_two_ranks
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import zerolab
from zerolab.unit import FlatUnit

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

UNITS = 3
STEPS = 2 * UNITS


def through_data(parameter: nn.Parameter) -> None:
    parameter.data.clamp_(-0.1, 0.1)


def through_a_part_of_data(parameter: nn.Parameter) -> None:
    parameter.data.view(-1)[1:].detach()[::2].mul_(0.5)


def in_inference_mode(parameter: nn.Parameter) -> None:
    with torch.inference_mode():
        parameter.data.clamp_(-0.1, 0.1)


def by_foreach(parameter: nn.Parameter) -> None:
    torch._foreach_mul_([parameter.data], 0.5)


WAYS = [through_data, through_a_part_of_data, in_inference_mode, by_foreach]


def without_pytorch(parameter: nn.Parameter) -> None:
    ctypes.memset(parameter.data_ptr(), 0, parameter.nbytes // 2)


def by_numpy(parameter: nn.Parameter) -> None:
    values = parameter.detach().numpy()
    np.clip(values, -0.1, 0.1, out=values)


def read_by_numpy(parameter: nn.Parameter) -> None:
    parameter.detach().numpy().sum()


class Writing(nn.Linear):
    """A layer whose forward writes to its own weight while ``write`` is set."""

    write = None

    def forward(self, x):
        if self.write:
            self.write(self.weight)
        return super().forward(x)


def build(stage: int, layer_class: type = Writing, **settings) -> zerolab.ZeroOptimizer:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer_class(8, 8) for _ in range(UNITS)))
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


def write_in_forward(layer: int, write, steps: int) -> tuple[int, str]:
    optimizer = build(3)
    train(optimizer, 2)
    optimizer.model[layer].write = write
    return train(optimizer, steps)


@pytest.mark.parametrize("write", WAYS)
@pytest.mark.parametrize("layer", range(UNITS))
def test_one_write_in_a_forward_is_refused_at_stage_3_by_its_name(layer: int, write):
    for said in on_two_ranks(write_in_forward, layer, write, 1):
        assert said[0] == 0 and f"parameter {layer}.weight was written to while it was gathered" in said[1]


@pytest.mark.parametrize("layer", range(UNITS))
def test_a_forward_that_writes_without_pytorch_is_refused_after_as_many_steps_as_units(layer: int):
    for steps, said in on_two_ranks(write_in_forward, layer, without_pytorch, STEPS):
        assert steps < UNITS and f"a parameter of unit {layer} was written to while it was gathered" in said


@pytest.mark.parametrize("layer", range(UNITS))
def test_memory_that_numpy_holds_is_refused_at_stage_3(layer: int):
    for steps, said in on_two_ranks(write_in_forward, layer, read_by_numpy, 1):
        assert steps == 0 and f"a parameter of unit {layer} was given to NumPy" in said and ".clone()" in said


class WritingInBackward(Writing):
    """A layer that writes to its own weight in the backward pass."""

    def forward(self, x):
        inner = nn.functional.linear(x, self.weight, self.bias)
        if self.write:
            inner.register_hook(lambda _: self.write(self.weight))
        return inner * 2


def write_in_backward(layer: int) -> tuple[int, str]:
    optimizer = build(3, WritingInBackward)
    train(optimizer, 2)
    optimizer.model[layer].write = through_data
    return train(optimizer, 1)


@pytest.mark.parametrize("layer", range(UNITS))
def test_one_write_in_a_backward_is_refused_at_stage_3(layer: int):
    for said in on_two_ranks(write_in_backward, layer):
        assert said[0] == 0 and f"parameter {layer}.weight was written to while it was gathered" in said[1]


def write_later_to_what_data_returned(stage: int) -> tuple[int, str]:
    """A module keeps the tensor that ``.data`` returned, and writes to it some steps later, on rank 1."""
    optimizer = build(stage)
    kept = []
    optimizer.model[1].write = lambda weight: kept.append(weight.data[1:])
    train(optimizer, 1)
    optimizer.model[1].write = None
    train(optimizer, 2)
    if stage == 3 or optimizer.rank:
        optimizer.model[1].write = lambda _: kept[0].mul_(0.5)
    return train(optimizer, 1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_tensor_that_data_returned_long_ago_is_watched_too(stage: int):
    found = "parameter 1.weight was written to" if stage == 3 else "has unit 1, checksum"
    for steps, said in on_two_ranks(write_later_to_what_data_returned, stage):
        assert steps == 0 and found in said


def write_between_steps(stage: int, lasting: bool, precision: str, write) -> tuple[int, str]:
    """Rank 1 alone writes to the last layer, once or before every step."""
    optimizer = build(stage, precision=precision)
    train(optimizer, 1)
    for step in range(STEPS):
        if optimizer.rank == 1 and (lasting or step == 0):
            write(optimizer.model[UNITS - 1].weight)
        done, said = train(optimizer, 1)
        if not done:
            return step, said
    return STEPS, "accepted"


@pytest.mark.parametrize("write", WAYS)
@pytest.mark.parametrize("precision", ["fp32", "mixed"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_write_on_one_rank_is_found_at_the_next_step(stage: int, precision: str, write):
    for steps, said in on_two_ranks(write_between_steps, stage, False, precision, write):
        assert steps == 0 and f"has unit {UNITS - 1}, checksum" in said and "on every rank" in said


@pytest.mark.parametrize("write", [without_pytorch, by_numpy])
@pytest.mark.parametrize("stage, lasting", [(0, False), (0, True), (1, True), (2, True)])
def test_values_that_differ_by_rank_are_found_after_as_many_steps_as_units(stage: int, lasting: bool, write):
    for steps, said in on_two_ranks(write_between_steps, stage, lasting, "fp32", write):
        assert steps < UNITS and f"has unit {UNITS - 1}, checksum" in said and "on every rank" in said


def write_the_same(stage: int) -> tuple[int, str]:
    optimizer = build(stage)
    for _ in range(STEPS):
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


def read_in_every_forward(stage: int) -> tuple[tuple[int, str], int, int]:
    """Nothing is written. How often are a unit's values read in a step, and how many aliases are kept?"""
    optimizer, counts = build(stage), []
    for layer in optimizer.model:
        layer.write = lambda weight: weight.data.norm() + weight.data[0].sum()
    plain = FlatUnit.checksum
    FlatUnit.checksum = lambda unit: counts.append(unit) or plain(unit)
    train(optimizer, 1)
    counts.clear()
    said, reads = train(optimizer, 1), len(counts)
    taken = [torch.empty(8 * 8 * 3 + each) for each in range(20)]  # so that freed memory comes back elsewhere
    train(optimizer, STEPS)
    del taken
    return said, reads, sum(len(flat.writes.data.versions()) for flat in optimizer.engine.flats)


@pytest.mark.parametrize("stage, reads", [(0, 1), (1, 1), (2, 1), (3, 2)])
def test_to_read_data_is_no_write_and_costs_no_comparison(stage: int, reads: int):
    assert on_two_ranks(read_in_every_forward, stage) == [((1, "accepted"), reads, UNITS)] * 2


def count_checksums(stage: int) -> list[int]:
    """How many times a unit's values are read in each step."""
    optimizer, counts = build(stage), []
    plain = FlatUnit.checksum
    FlatUnit.checksum = lambda unit: counts.append(unit) or plain(unit)
    found = []
    for _ in range(STEPS):
        counts.clear()
        train(optimizer, 1)
        found.append(len(counts))
    return found


@pytest.mark.parametrize("stage, reads", [(0, 1), (2, 1), (3, 2)])
def test_no_step_reads_more_than_one_unit(stage: int, reads: int):
    for found in on_two_ranks(count_checksums, stage):
        assert max(found) == reads and found[1:] == [reads] * (STEPS - 1)


@pytest.mark.parametrize("stage, reads", [(0, 0), (2, 0), (3, 2)])
def test_one_rank_alone_has_nothing_to_compare_below_stage_3(stage: int, reads: int):
    (found,) = zerolab.launch(count_checksums, 1, stage, timeout=60)
    assert found[1:] == [reads] * (STEPS - 1)


def count_checksums_after_a_write(stage: int) -> int:
    """How many units are read in the step after the one that has taken note of a write."""
    optimizer, counts = build(stage), []
    optimizer.model[0].weight.data.mul_(0.9)
    assert train(optimizer, 1) == (1, "accepted")
    plain = FlatUnit.checksum
    FlatUnit.checksum = lambda unit: counts.append(unit) or plain(unit)
    train(optimizer, 1)
    return len(counts)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_write_that_was_accepted_is_not_looked_at_again(stage: int):
    assert on_two_ranks(count_checksums_after_a_write, stage) == [1, 1]


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
        assert "parameter last.weight was written to while it was gathered" in said


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
        lost = f"parameter {layer}.bias was written to while it was gathered"
        assert (lost if stage == 3 else f"has unit {layer}, checksum") in said


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weights_initialized_from_the_same_batch_are_kept_below_stage_3(stage: int):
    assert on_two_ranks(initialize_in_forward, stage, 0, True) == ["accepted"] * 2


def write_compiled(stage: int) -> tuple[int, str]:
    """A compiled forward that writes through ``.data``, at stages 0 to 2 on rank 1 alone."""
    optimizer = build(stage)
    if stage == 3 or optimizer.rank:
        optimizer.model[1].write = through_data
    optimizer.model[1].compile(backend="aot_eager")
    return train(optimizer, 1)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_write_in_a_compiled_forward_is_found(stage: int):
    found = "parameter 1.weight was written to" if stage == 3 else "has unit 1, checksum"
    for steps, said in on_two_ranks(write_compiled, stage):
        assert steps == 0 and found in said


def read_after_other_memory_was_given(stage: int) -> bool:
    """Whether ``.data`` is the parameter's memory of now, and the earlier memory is free."""
    model = build(stage).model
    weight = model[1].weight
    weight.data.sum()
    weight.data = torch.ones(8, 8)
    return bool((weight.data == 1).all()) and weight.data.data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("stage", [0, 2])
def test_data_that_was_assigned_is_what_data_returns(stage: int):
    assert on_two_ranks(read_after_other_memory_was_given, stage) == [True, True]


def read_in_full_params() -> tuple[bool, bool]:
    optimizer = build(3)
    with optimizer.full_params():
        optimizer.model[1].weight.data.sum()
        while_open = StorageWeakRef(optimizer.model[1].weight.untyped_storage())
        before = while_open.expired()
    return before, while_open.expired()


def test_what_was_read_in_full_params_takes_no_memory_after_it():
    assert on_two_ranks(read_in_full_params) == [(False, True)] * 2


def copies() -> list[type]:
    """The classes of parameters in a copy of the model, in a file, and in the model itself."""
    optimizer = build(3)
    with optimizer.full_params():
        copied = copy.deepcopy(optimizer.model)
        copied[0].weight.data.zero_()
        file = io.BytesIO()
        torch.save(optimizer.model[1].weight, file)
        file.seek(0)
        loaded = torch.load(file)
        same = bool((loaded == optimizer.model[1].weight).all())
        own = type(optimizer.model[0].weight)
    assert same and train(optimizer, 1) == (1, "accepted")
    return [type(copied[0].weight), type(loaded), own]


def shown() -> list[str]:
    model = build(0).model
    return [repr(model[0].bias), repr(nn.Parameter(model[0].bias.detach().clone()))]


def test_it_looks_like_any_parameter():
    for own, plain in on_two_ranks(shown):
        assert own == plain and own.startswith("Parameter containing:\ntensor([")


def test_a_copy_is_an_ordinary_parameter():
    for copied, loaded, own in on_two_ranks(copies):
        assert copied is loaded is nn.Parameter and issubclass(own, nn.Parameter)
