"""A training run that changes its size on the way: sharded, by checkpoint; in one process, without."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zerolab
from support.references import Replicas

WIDTH = 13  # no multiple of anything: shards cut parameters anywhere, and padding is everywhere
STEPS = 3
NUMBERS = ("step", "mu_product")  # what optimizers keep for a parameter as a whole

Values = dict[tuple[str, str], torch.Tensor]
"""By parameter name and "value" or the key of a state: the flattened whole, or a number."""


class Subject(nn.Module):
    """Blocks, and every kind of parameter that has been lost in a checkpoint before."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight  # tied
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (self.gain * self.frozen(x)).square().mean()


@dataclass(frozen=True)
class Part:
    """One part of a run, between two checkpoints."""

    world_size: int
    stage: int
    precision: str = "fp32"
    fewer_units: bool = False  # the middle block in the root unit


def groups_of(model: nn.Module) -> list[dict]:
    """Two parameter groups, neither in the model's order."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    biases = [p for name, p in named if "bias" in name]
    others = [p for name, p in named if "bias" not in name]
    return [{"params": others[::-1]}, {"params": biases, "lr": 0.02}]


def micro_batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * step + rank))


def optimizer_of(part: Part, name: str, defaults: dict, seed: int = 17) -> zerolab.ZeroOptimizer:
    """On a rank: the subject, by default from weights that no checkpoint has, and its optimizer."""
    torch.manual_seed(seed)
    model = Subject()
    return zerolab.ZeroOptimizer(
        model,
        getattr(torch.optim, name),
        part.stage,
        groups_of(model),
        list(model.blocks)[:: 2 if part.fewer_units else 1],
        part.precision,
        **defaults,
    )


def train(optimizer: zerolab.ZeroOptimizer, start: int, steps: int = STEPS) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        loss = optimizer.model(micro_batch(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def first_part(part: Part, name: str, defaults: dict, folder: Path) -> list[float]:
    """On a rank: train from the reference's weights, change a hyperparameter, and save."""
    optimizer = optimizer_of(part, name, defaults, seed=0)
    losses = train(optimizer, 0)
    optimizer.param_groups[0]["lr"] = 0.03
    zerolab.save(optimizer, folder, extra={"step": STEPS, "rank": dist.get_rank()})
    return losses


def second_part(part: Part, name: str, defaults: dict, folder: Path):
    """On a rank: load, and train on. What it held before and after, the losses, and what was extra."""
    optimizer = optimizer_of(part, name, defaults)
    extra = zerolab.load(optimizer, folder)
    loaded = held(optimizer)
    losses = train(optimizer, extra["step"])
    return loaded, held(optimizer), losses, extra["rank"]


def held(optimizer: zerolab.ZeroOptimizer) -> list[tuple[tuple[str, str], int, torch.Tensor]]:
    """What this rank holds, in slices: of which value, from which element, and which."""
    found = []
    for unit in optimizer.units:
        values = unit.shard if unit.master is None else unit.master
        for span in unit.spans:
            part = span.within(unit.owned.start, unit.owned.stop)
            start = unit.owned.start + part.start - span.offset
            found.append(((span.name, "value"), start, values[part].detach().clone()))
    for each in optimizer.slices:
        start = each.unit.owned.start + each.part.start - each.span.offset
        for key, value in optimizer.state.get(each.tensor, {}).items():
            found.append(((each.span.name, key), start, torch.as_tensor(value).clone()))
    return found


def reference(parts: list[Part], name: str, defaults: dict) -> list[tuple[Values, list[float]]]:
    """The same run in one process: all values after each part, as the next loads them; rank 0's losses."""
    first, *others = parts
    replicas = Replicas(
        Subject, first.world_size, getattr(torch.optim, name), groups_of, first.precision, **defaults
    )
    results = []
    for index, following in enumerate([*others, None]):
        losses = []

        def passes(model: nn.Module, step: int, rank: int, losses: list[float] = losses) -> Iterator[None]:
            loss = model(micro_batch(step, rank))
            loss.backward()
            losses += [loss.item()] if rank == 0 else []
            yield

        replicas.train(passes, STEPS, start=index * STEPS)
        if following:
            replicas.resize(following.world_size, following.precision)
        results.append((values_of(replicas.whole, replicas.optimizer), losses))
        replicas.optimizer.param_groups[0]["lr"] = 0.03
    return results


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Values:
    values = {(name, "value"): p.detach().flatten().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            value = torch.as_tensor(value).clone()
            values[name, key] = value if key in NUMBERS else value.flatten()
    return values
