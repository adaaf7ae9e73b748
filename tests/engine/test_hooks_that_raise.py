"""Promise: after an exception in a user's own hook the run goes on as in PyTorch, and can be saved."""

import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from support.beside_plain import BATCH, Make, differing
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


class Stop(Exception):
    pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def before_the_engines(block: nn.Module, stop) -> torch.utils.hooks.RemovableHandle:
    return block.register_forward_pre_hook(stop, prepend=True)


def of_all_modules(block: nn.Module, stop) -> torch.utils.hooks.RemovableHandle:
    of_block = lambda module, args: stop(module, args) if module is block else None
    return register_module_forward_pre_hook(of_block)


def train(make: Make, register, folder: Path) -> nn.Module:
    """One forward is stopped by a hook that runs before the engine's own."""
    model = Net()
    optimizer = make(model, torch.optim.Adam, lr=0.1)

    def stop(module, args):
        raise Stop

    handle = register(model.blocks[1], stop)
    with pytest.raises(Stop):
        model(BATCH)
    handle.remove()
    for _ in range(2):
        model(BATCH).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, zerolab.ZeroOptimizer):
        zerolab.save(optimizer, folder)
        zerolab.load(optimizer, folder)
    return model


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("register", [before_the_engines, of_all_modules])
def test_a_hook_that_runs_before_the_engines(register, stage: int, tmp_path: Path):
    assert differing(lambda make: train(make, register, tmp_path), stage) == set()
