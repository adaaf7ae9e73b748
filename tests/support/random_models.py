"""Models drawn by chance, for test_drawn_models.py: what a case is, and its training on the ranks.

Whatever a sharded optimizer could trip over may be in one: parameters without elements, without dimensions
and of any other shape, frozen, tied, never used or by some ranks alone, in no group at all; and empty groups.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zerolab
from support import subjects
from zerolab.measure import MeasuredStates
from zerolab.trace import Traffic

WIDTH, BATCH, STEPS = 5, 3, 2
STAGES = (0, 1, 2, 3)
USES = ("always", "never", "where the first input is positive")
GROUPS = ({}, {"lr": 0.02}, {"weight_decay": 0.3})
OPTIMIZERS = {"Adam": {"lr": 0.05}, "SGD": {"lr": 0.1, "momentum": 0.9}, "RMSprop": {"lr": 0.02}}
STATE_BYTES = {"Adam": 8, "SGD": 4, "RMSprop": 4}  # of each parameter


@dataclass(frozen=True)
class Weight:
    """A parameter: its shape, and when it is used."""

    shape: tuple[int, ...]
    use: str


@dataclass(frozen=True)
class Case:
    """A model and how it is trained.

    Attributes:
        hidden: by block, the width of its inner layer.
        weights: by block, and those of the model itself last.
        frozen, groups: read in turns, by the parameters in their order. Group 3 is none.
        units: "default", or which blocks to make units of.
    """

    hidden: tuple[int, ...]
    weights: tuple[tuple[Weight, ...], ...]
    tied: bool
    frozen: tuple[bool, ...]
    groups: tuple[int, ...]
    units: str | tuple[int, ...]
    optimizer: str
    prefetch: int
    reduces_in_flight: int


class Part(nn.Module):
    """Some parameters of any shape. Each element counts by a factor of its own."""

    def __init__(self, weights: tuple[Weight, ...]):
        super().__init__()
        self.uses = [weight.use for weight in weights]
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(weight.shape)) for weight in weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, use in zip(self.weights, self.uses, strict=True):
            if use == "always" or (use != "never" and x[0, 0] > 0):
                factors = torch.linspace(-1, 1, weight.numel()).view(weight.shape)
                x = x + torch.tanh((weight * factors).sum())
        return x


class Block(Part):
    def __init__(self, hidden: int, weights: tuple[Weight, ...]):
        super().__init__(weights)
        self.first, self.second = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.second(torch.tanh(self.first(x))))


class Drawn(nn.Module):
    """The model of a case. Its first parameter is always trained, so that there is something to train."""

    def __init__(self, case: Case):
        super().__init__()
        *inner, outer = case.weights
        self.before = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(map(Block, case.hidden, inner))
        self.after = Part(outer)
        if case.tied and len(self.blocks) > 1:
            self.blocks[-1].second.bias = self.blocks[0].second.bias
        for (_, parameter), frozen in list(in_turns(self, case.frozen))[1:]:
            parameter.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.after(x).square().mean()


def in_turns(model: nn.Module, choices: tuple) -> Iterator:
    """Each parameter with its choice; they take turns."""
    for index, named in enumerate(model.named_parameters()):
        yield named, choices[index % len(choices)]


def groups(case: Case, model: nn.Module) -> list[dict]:
    """Three groups, some of them empty perhaps; the first parameter is in the first."""
    listed = [dict(options, params=[]) for options in (*GROUPS, {})]
    for index, ((_, parameter), group) in enumerate(in_turns(model, case.groups)):
        if parameter.requires_grad:
            listed[group if index else 0]["params"].append(parameter)
    return listed[: len(GROUPS)]


def inputs(step: int, rank: int) -> tuple[torch.Tensor]:
    return (torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(31 * step + rank)),)


@dataclass
class Expected:
    """What a case should come to: the parameters, and how many of them there are of each kind."""

    parameters: subjects.Tensors
    psi: int
    frozen_psi: int
    updated_psi: int


@dataclass
class Found:
    """What it came to on one rank, and what that rank held and sent in the last step."""

    parameters: subjects.Tensors
    memory: MeasuredStates
    traffic: Traffic


def subject(case: Case) -> list[nn.Module]:
    """Have subjects.py train this case; the list that its units will be in, once the model is built."""
    chosen: list[nn.Module] = []

    def build() -> nn.Module:
        model = Drawn(case)
        chosen[:] = [] if case.units == "default" else [model.blocks[index] for index in case.units]
        return model

    subjects.SUBJECTS["drawn"] = build, inputs
    return chosen


def train_here(cases: list[Case]) -> list[Expected]:
    """On a rank, but alone: each case as one rank more than this one's number would train it."""
    return [train_one_here(case, dist.get_rank() + 1) for case in cases]


def train_one_here(case: Case, world_size: int) -> Expected:
    """In this process, without the engine."""
    subject(case)
    kind, defaults = getattr(torch.optim, case.optimizer), OPTIMIZERS[case.optimizer]
    run, *_ = subjects.train_replicas("drawn", world_size, kind, STEPS, partial(groups, case), **defaults)
    numel = lambda wanted: sum(p.numel() for name, p in Drawn(case).named_parameters() if wanted(name, p))
    return Expected(
        run.parameters,
        psi=numel(lambda name, p: p.requires_grad),
        frozen_psi=numel(lambda name, p: not p.requires_grad),
        updated_psi=numel(lambda name, p: run.state[name]),
    )


def train_sharded(cases: list[Case], folders: list[Path | None]) -> list[list[Found]]:
    """On a rank: each case at each stage. Where it has a folder, it is saved there at one of them."""
    found = []
    for place, (case, folder) in enumerate(zip(cases, folders, strict=True)):
        print(case, flush=True)  # to show which case hangs
        saved_at = STAGES[place % len(STAGES)]
        found.append([train_at(case, s, folder if s == saved_at else None) for s in STAGES])
    return found


def train_at(case: Case, stage: int, folder: Path | None) -> Found:
    units = subject(case)
    run, optimizer = subjects.train_sharded(
        "drawn", stage, getattr(torch.optim, case.optimizer), STEPS, partial(groups, case),
        units=None if case.units == "default" else units,
        together=stage == case.prefetch, prefetch=case.prefetch, reduces_in_flight=case.reduces_in_flight,
        **OPTIMIZERS[case.optimizer],
    )  # fmt: skip
    found = Found(run.parameters, optimizer.memory(), optimizer.trace.traffic(STEPS - 1))
    optimizer.zero_grad()
    if folder:
        zerolab.save(optimizer, folder)
    return found


def load(cases: list[Case], folders: list[Path]) -> list[subjects.Tensors]:
    """On a rank: what each folder has of its case, in the default units and at another stage than it was."""
    found = []
    for place, (case, folder) in enumerate(zip(cases, folders, strict=True)):
        torch.manual_seed(1)  # other weights than any checkpoint's
        model = Drawn(case)
        kind, stage = getattr(torch.optim, case.optimizer), (place + 1) % len(STAGES)
        defaults = OPTIMIZERS[case.optimizer]
        optimizer = zerolab.ZeroOptimizer(model, kind, stage, groups(case, model), **defaults)
        zerolab.load(optimizer, folder)
        with optimizer.full_params():
            found.append(subjects.copies(model.named_parameters()))
    return found
