"""Steps of models made of blocks, with what is whole and which gradients there are inside each block."""

from dataclasses import dataclass, field

import torch
from torch import nn

import zerolab
from support import training
from support.training import WIDTH
from support.user_models import Block, Net

DEPTH = 6


class Routed(Net):
    """Goes through the blocks it is told to, in the order it is told."""

    def __init__(self):
        super().__init__(depth=DEPTH)
        self.path = range(DEPTH)

    def forward(self, x):
        x = self.before(x)
        for index in self.path:
            x = self.blocks[index](x)
        return self.after(x)


@dataclass
class Watch:
    """What is seen half-way through each block, in forward and in backward, of one step."""

    optimizer: zerolab.ZeroOptimizer
    whole: list[list[str]] = field(default_factory=list)
    grads: list[list[str]] = field(default_factory=list)
    gathers: list[int] = field(default_factory=list)

    def inside_a_block(self, module: nn.Module, args: tuple) -> None:
        self.look()
        args[0].register_hook(lambda gradient: self.look())

    def look(self) -> None:
        units = [unit for unit in self.optimizer.units if unit.name != "root"]
        self.whole.append([u.name for u in units if u.flat.untyped_storage().nbytes()])
        self.grads.append([u.name for u in units if u.grads.local is not None])
        events = self.optimizer.trace.step(self.optimizer.trace.step_number)
        self.gathers.append(sum(event.op == "all_gather" and event.unit != "root" for event in events))


def watched_steps(stage: int, model_class, paths: list, **settings) -> list[tuple[Watch, list]]:
    """For each step, with the path to take: what was seen, and the collectives as (op, unit, phase)."""
    torch.manual_seed(0)
    model = model_class()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1, **settings)
    watch = Watch(optimizer)
    for block in model.blocks:
        block.second.register_forward_pre_hook(watch.inside_a_block)
    found = []
    for step, path in enumerate(paths):
        watch.whole, watch.grads, watch.gathers = [], [], []
        model.path = path
        model(training.micro_batch(step, optimizer.rank)).square().mean().backward()
        number = optimizer.trace.step_number
        optimizer.step()
        optimizer.zero_grad()
        events = [(each.op, each.unit, each.phase) for each in optimizer.trace.step(number)]
        found.append(((watch.whole, watch.grads, watch.gathers), events))
    return found


def launched(world_size: int, *args, **settings) -> list:
    return zerolab.launch(watched_steps, world_size, *args, timeout=60, **settings)


def gathered(events: list, phase: str) -> list[str]:
    return [unit for op, unit, when in events if op == "all_gather" and when == phase and unit != "root"]


def blocks(*indices: int) -> list[str]:
    return [f"blocks.{index}" for index in indices]


class Backwards(nn.Module):
    """A decoder registered before its encoder: the order of registration is not the order of use."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)
        self.decoder = nn.ModuleList(Block() for _ in range(3))
        self.encoder = nn.ModuleList(Block() for _ in range(3))

    @property
    def blocks(self) -> list[Block]:
        return [*self.encoder, *self.decoder]

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)
