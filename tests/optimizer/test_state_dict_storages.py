"""Promise: tools that know tied weights by their storage find all of a state dict, and the ties."""

import collections
import io
import sys

import cloudpickle
import pytest
import torch
from support.trained import on_two_ranks
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last))
        self.head = nn.Linear(8, 6)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, x):
        return self.head(self.blocks[0](x)).sum() + self.blocks[1](torch.ones(1, 2, 3, 3)).sum()


NAMES = [*Tied().state_dict()]


def cleaned(state_dict: dict) -> dict[str, torch.Tensor]:
    """What Accelerate's save_model writes: of the tensors that seem to share a storage the first alone."""
    by_storage = collections.defaultdict(list)
    for name, tensor in state_dict.items():
        storage = tensor.untyped_storage()
        by_storage[tensor.device, storage.data_ptr(), storage.nbytes()].append(name)
    return {names[0]: state_dict[names[0]] for names in by_storage.values()}


def build(stage: int) -> zerolab.ZeroOptimizer:
    torch.manual_seed(0)
    return zerolab.ZeroOptimizer(Tied(), torch.optim.SGD, stage=stage, units=[], lr=0.1)


def save(stage: int, mode) -> dict[str, bool]:
    """By name, whether what the tool would save is the parameter; and what the state dict does later on."""
    optimizer = build(stage)
    with optimizer.full_params(), mode():
        found = cleaned(optimizer.model.state_dict())
        equal = {name: torch.equal(found[name], dict(optimizer.model.state_dict())[name]) for name in found}
        content, part = io.BytesIO(), io.BytesIO()
        torch.save(optimizer.model.state_dict(), content)
        torch.save(optimizer.model.blocks[0].state_dict(), part)
        expected = {name: value.clone() for name, value in found.items()}
        parts = cleaned(optimizer.model.blocks.state_dict())
    optimizer.model(torch.ones(3, 8)).backward()
    optimizer.step()
    if stage == 3:  # what is left to those who keep it
        equal["kept"] = all(torch.equal(found[name], expected[name]) for name in found)
    loaded = torch.load(io.BytesIO(content.getvalue()))
    tied = loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    return equal | {"tied": tied, "small file": part.tell() < 2500, "parts": len(parts) == 4}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_tool_that_leaves_out_tied_weights_saves_every_parameter(stage: int, mode):
    for found in on_two_ranks(save, stage, mode):
        assert set(NAMES) - {"head.weight"} <= found.keys() and "head.weight" not in found
        assert all(found.values()), found


def write(stage: int, by_rank: bool) -> tuple[str, float]:
    """Write through a state dict, as loops that load weights by hand do."""
    optimizer = build(stage)
    state_dict = optimizer.model.state_dict()
    state_dict["embed.weight"].fill_(2.0 + by_rank * optimizer.rank)
    value = optimizer.model.embed.weight.mean().item()
    assert state_dict["head.weight"].mean() == value
    try:
        optimizer.model(torch.ones(3, 8)).backward()
        optimizer.step()
    except RuntimeError as error:
        return str(error), value
    return "accepted", value


@pytest.mark.parametrize("stage", [0, 2])
def test_what_is_written_to_a_state_dict_is_written_to_the_model(stage: int):
    assert on_two_ranks(write, stage, False) == [("accepted", 2.0)] * 2


@pytest.mark.parametrize("stage", [0, 2])
def test_and_is_noticed_where_ranks_differ(stage: int):
    for said, _ in on_two_ranks(write, stage, True):
        assert "ranks disagree about the values written to parameters" in said


def look_before_the_root_is_freed() -> tuple[int, int]:
    """After an evaluation the root is whole, and its storage is freed under those who view it."""
    optimizer = build(3)
    with torch.no_grad():
        optimizer.model(torch.ones(3, 8))
    optimizer.model.head(torch.ones(3, 8)).sum()
    storage = optimizer.model.head.state_dict()["bias"].untyped_storage()
    return storage.nbytes(), optimizer.units[0].flat.untyped_storage().nbytes()


def test_a_storage_that_will_be_freed_is_handed_out_as_it_is():
    for seen, whole in on_two_ranks(look_before_the_root_is_freed):
        assert seen == whole > 0
