"""Plain training: what data parallelism promises to equal, in one process and in torch alone.

Every rank is a copy of the model here. Each micro-batch's gradients are added up over the copies in rank
order, micro-batch by micro-batch, and divided once by N before one step of the stock optimizer. The copies
keep their own buffers, as ranks do.
"""

import itertools
import traceback
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

import zerolab

WIDTH, BATCH, STEPS = 8, 4, 3
DEFAULTS = {"lr": 0.05, "weight_decay": 0.1}  # decay moves a parameter that should have been left alone

Gradients = dict[str, torch.Tensor]
Losses = Callable[[nn.Module, torch.Tensor, int], Iterator[torch.Tensor | Callable[[], None]]]
"""A generator over what one rank takes backward in one step: losses, or functions that do it themselves."""


def micro_batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def passes(losses: Losses, model: nn.Module, step: int, rank: int) -> Iterator[None]:
    """Do one rank's forward and backward passes of one step, stopping after each backward."""
    generator = losses(model, micro_batch(step, rank), step)
    for index in itertools.count():
        torch.manual_seed(7919 * step + 101 * index + rank)
        loss = next(generator, None)
        if loss is None:
            return
        loss.backward() if isinstance(loss, torch.Tensor) else loss()
        yield


def train_plain(build: Callable[[], nn.Module], losses: Losses, world_size: int, steps: int = STEPS):
    """The parameters by name after training in this process alone, for ``world_size`` ranks."""
    copies = [built(build) for _ in range(world_size)]
    model = copies[0]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **DEFAULTS)
    for step in range(steps):
        ranks = [_fresh_gradients(losses, each, step, rank) for rank, each in enumerate(copies)]
        total: Gradients = {}
        for micro in zip(*ranks, strict=True):
            total = _sum([total, _sum(micro)])
        for name, parameter in model.named_parameters():
            parameter.grad = total[name] / world_size if name in total else None
        optimizer.step()
        for each in copies:
            each.zero_grad()
            with torch.no_grad():
                for mine, first in zip(each.parameters(), model.parameters(), strict=True):
                    mine.copy_(first)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def _fresh_gradients(losses: Losses, model: nn.Module, step: int, rank: int) -> Iterator[Gradients]:
    """What each backward pass of one rank adds; nothing is left in the model."""
    for _ in passes(losses, model, step, rank):
        yield {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()


def _sum(parts) -> Gradients:
    total: Gradients = {}
    for gradients in parts:
        for name, gradient in gradients.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


def train_sharded(build: Callable[[], nn.Module], losses: Losses, stage: int, steps: int = STEPS, **settings):
    """The parameters by name after training as one rank of the process group."""
    model = built(build)
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, **settings, **DEFAULTS)
    for step in range(steps):
        for _ in passes(losses, model, step, dist.get_rank()):
            pass
        optimizer.step()
        optimizer.zero_grad()
    return whole(model, optimizer)


def whole(model: nn.Module, optimizer: zerolab.ZeroOptimizer) -> dict[str, torch.Tensor]:
    with optimizer.full_params():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """The parameters in which two runs differ, by name; NaN differs from everything."""
    assert ours.keys() == theirs.keys()
    return [name for name in theirs if not torch.equal(ours[name], theirs[name])]


def compare(make: Callable[[], tuple], stages: tuple[int, ...], **settings) -> dict[int, list[str] | str]:
    """On a rank: train the case plainly once and sharded at each stage; what differs or failed, by stage.

    ``make`` gives a function that builds the model, and the losses of one step.
    """
    build, losses = make()
    expected = train_plain(build, losses, dist.get_world_size())
    found: dict[int, list[str] | str] = {}
    for stage in stages:
        try:
            found[stage] = differing(train_sharded(build, losses, stage, **settings), expected)
        except Exception:
            found[stage] = traceback.format_exc()
    return found


def compare_all(cases: dict[str, Callable], stages: tuple[int, ...], **settings) -> dict[str, dict]:
    """On a rank: every case in turn. Its name is printed first, so that a hang can be laid at its door."""
    found = {}
    for name, make in cases.items():
        print(name, flush=True)
        found[name] = compare(make, stages, **settings)
    return found


def assert_same_bits(make, world_size: int = 2, stages: tuple[int, ...] = (0, 1, 2, 3), **settings) -> None:
    """Every stage on ``world_size`` ranks leaves the bits of plain training, on every rank."""
    for found in zerolab.launch(compare, world_size, make, stages, timeout=60, **settings):
        assert found == {stage: [] for stage in stages}
