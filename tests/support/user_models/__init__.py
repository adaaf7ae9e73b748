"""Models as their authors would write them, for tests/engine/test_models_as_they_come.py.

A case is a function that gives two: one that builds the model, and the losses of one step. Each module here
collects its own in ``case.named``.
"""

import importlib
import pkgutil
from collections.abc import Callable

import torch
from torch import nn

from support.training import WIDTH


def cases():
    """A decorator that collects cases by name, in ``named``."""

    def case(make):
        case.named[make.__name__.replace("_", " ")] = make
        return make

    case.named = {}
    return case


def every_case() -> dict[str, dict[str, Callable]]:
    """All cases, by module and by name."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}").case.named for name in modules}


class Block(nn.Module):
    """Two layers and a residual: gradients come from two paths."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


class Net(nn.Module):
    """Something before the blocks, the blocks, something after."""

    def __init__(self, block=Block, depth: int = 3):
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.after = nn.Linear(WIDTH, 5)

    def forward(self, x):
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.after(x)


def squares(model, x, step):
    yield model(x).square().mean()
