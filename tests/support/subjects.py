"""Small models with what a sharded optimizer could trip over, trained by the engine and by references."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

import zerolab
from support.references import Replicas, Tensors, copies
from support.seeding import seed_all
from support.together import update_together
from zerolab import models


class Patchwork(nn.Module):
    """A conv net with whatever a sharded optimizer could trip over: uneven sizes, a frozen layer, a parameter
    nobody uses, one that some ranks use, one without elements, buffers that differ by rank, and dropout.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 3, 3, bias=False),
            nn.BatchNorm2d(3),
            nn.ReLU(),
            nn.Conv2d(3, 5, 2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(45, 7),
            nn.Linear(7, 7),
        )
        self.layers[-1].requires_grad_(False)
        self.head = nn.Linear(7, 3)
        self.detour = nn.Linear(3, 3)
        self.unused = nn.Parameter(torch.ones(7))
        self.nothing = nn.Parameter(torch.empty(0, 4))

    def forward(self, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layers(images))
        if len(images) == 3:  # on odd ranks
            logits = logits + self.detour(logits)
        return nn.functional.cross_entropy(logits, classes) + self.nothing.sum()


class Tiny(nn.Linear):
    """Two parameters of one element each: at three ranks somebody owns nothing."""

    def __init__(self):
        super().__init__(1, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(super().forward(x), y)


class Ladder(nn.Module):
    """Equal layers in one container and no root unit: every unit is as large as the next, without padding."""

    def __init__(self, depth: int = 5, width: int = 16):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


class Headed(Ladder):
    """A root that backward needs first and never again, and of which odd ranks alone use a part."""

    def __init__(self):
        super().__init__(depth=3)
        self.head, self.detour = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = self.head(self.layers(x))
        if len(x) == 3:
            found = found + self.detour(found)
        return nn.functional.mse_loss(found, y)


def gpt(tied: bool = False, depth: int = 2) -> nn.Module:
    return models.GPT(vocab=23, width=12, depth=depth, heads=2, context=6, tied=tied)


def tied_gpt() -> nn.Module:
    return gpt(tied=True)


def deep_gpt() -> nn.Module:
    return gpt(depth=5)


def _generator(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1 + 97 * step + rank)


def tokens(step: int, rank: int) -> tuple:
    drawn = torch.randint(23, (2, 7), generator=_generator(step, rank))
    return drawn[:, :-1], drawn[:, 1:]


def images(step: int, rank: int) -> tuple:
    """Odd ranks hold a batch of another size."""
    batch, generator = 2 + rank % 2, _generator(step, rank)
    return torch.randn(batch, 1, 6, 6, generator=generator), torch.randint(3, (batch,), generator=generator)


def numbers(step: int, rank: int) -> tuple:
    x = torch.randn(4, 1, generator=_generator(step, rank))
    return x, 3 * x - 1


def vectors(step: int, rank: int) -> tuple:
    drawn = torch.randn(2, 3, 16, generator=_generator(step, rank))
    return drawn[0], drawn[1]


def uneven_vectors(step: int, rank: int) -> tuple:
    """Odd ranks hold a batch of another size."""
    drawn = torch.randn(2, 2 + rank % 2, 16, generator=_generator(step, rank))
    return drawn[0], drawn[1]


SUBJECTS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], tuple]]] = {
    "gpt": (gpt, tokens),
    "tied": (tied_gpt, tokens),
    "deep": (deep_gpt, tokens),
    "patchwork": (Patchwork, images),
    "tiny": (Tiny, numbers),
    "ladder": (Ladder, vectors),
    "headed": (Headed, uneven_vectors),
}


@dataclass
class Run:
    """What a training left: parameters and state by parameter name; losses and buffers of one rank or all."""

    parameters: Tensors
    losses: list[float] = field(default_factory=list)
    buffers: Tensors = field(default_factory=dict)
    state: dict[str, dict] = field(default_factory=dict)


def same(ours: Run, theirs: Run) -> bool:
    """Whether two trainings left the same bits in every parameter."""
    return all(torch.equal(ours.parameters[name], value) for name, value in theirs.parameters.items())


def _loss(model: nn.Module, inputs: Callable, step: int, rank: int) -> torch.Tensor:
    arguments = inputs(step, rank)
    seed_all(10_000 + 97 * step + rank)  # dropout's numbers belong to the micro-batch
    return model(*arguments)


# In one process.


def train_replicas(
    subject: str,
    world_size: int,
    optimizer_class: type[torch.optim.Optimizer],
    steps: int,
    groups: Callable[[nn.Module], list] | None = None,
    schedule: Callable[[torch.optim.Optimizer], object] | None = None,
    **defaults,
) -> list[Run]:
    """Train as many replicas as there are ranks; what each rank would hold."""
    build, inputs = SUBJECTS[subject]
    replicas = Replicas(build, world_size, optimizer_class, groups, **defaults)
    runs = [Run({}) for _ in range(world_size)]

    def passes(model: nn.Module, step: int, rank: int) -> Iterator[None]:
        loss = _loss(model, inputs, step, rank)
        loss.backward()
        runs[rank].losses.append(loss.item())
        yield

    replicas.train(passes, steps, schedule(replicas.optimizer) if schedule else None)
    for run, model in zip(runs, replicas.models, strict=True):
        run.parameters, run.buffers = copies(replicas.masters.items()), copies(model.named_buffers())
        run.state = {name: dict(replicas.optimizer.state.get(p, {})) for name, p in replicas.masters.items()}
    return runs


# On one rank of many.


def train_sharded(
    subject: str,
    stage: int,
    optimizer_class: type[torch.optim.Optimizer],
    steps: int,
    groups: Callable[[nn.Module], list] | None = None,
    schedule: Callable[[torch.optim.Optimizer], object] | None = None,
    together: bool = False,
    resume: Path | None = None,
    **keywords,
) -> tuple[Run, object]:
    """The same training with the engine, each rank from another seed; and the optimizer, to look into.

    ``together``: whether small units are updated together. ``resume``: where to save half-way; a new model
    and optimizer go on from there, with the same scheduler.
    """
    update_together(together)
    inputs, run, rank = SUBJECTS[subject][1], Run({}), torch.distributed.get_rank()
    build = partial(_build_sharded, subject, optimizer_class, stage, groups, keywords)
    model, optimizer = build(rank)
    scheduler = schedule(optimizer) if schedule else None
    for step in range(steps):
        if resume is not None and step == steps // 2:
            zerolab.save(optimizer, resume)
            model, optimizer = build(rank + 1)
            zerolab.load(optimizer, resume, trust=True)  # groups may hold classes, as SCION's do
            if scheduler:
                scheduler.optimizer = optimizer
        optimizer.zero_grad()
        loss = _loss(model, inputs, step, rank)
        loss.backward()
        run.losses.append(loss.item())
        optimizer.step()
        if scheduler:
            scheduler.step()
    run.state, run.buffers = own_state(optimizer), copies(model.named_buffers())
    with optimizer.full_params():
        run.parameters = copies(model.named_parameters())
    return run, optimizer


def _build_sharded(
    subject: str,
    optimizer_class: type[torch.optim.Optimizer],
    stage: int,
    groups: Callable[[nn.Module], list] | None,
    keywords: dict,
    seed: int,
) -> tuple[nn.Module, zerolab.ZeroOptimizer]:
    torch.manual_seed(seed)
    model = SUBJECTS[subject][0]()
    return model, zerolab.ZeroOptimizer(model, optimizer_class, stage=stage, params=groups, **keywords)


def own_state(optimizer) -> dict[str, dict]:
    """What this rank's optimizer remembers of each parameter, and from which element on."""
    return {
        each.span.name: {
            "start": each.unit.owned.start + each.part.start - each.span.offset,
            **optimizer.state.get(each.tensor, {}),
        }
        for each in optimizer.slices
    }


def joined_state(runs: list[Run], name: str, key: str) -> torch.Tensor:
    """One parameter's state, put together from the ranks' slices; each element must be on one rank only."""
    pieces = [(run.state[name]["start"], run.state[name][key]) for run in runs]
    stop = 0
    for start, piece in (pair for pair in pieces if pair[1].numel()):
        assert start == stop, (
            f"{key} of {name}: a slice starts at {start} where the one before ended at {stop}"
        )
        stop += piece.numel()
    return torch.cat([piece for _, piece in pieces])
