"""One training loop, run by the engine on a rank and by replicas in one process, and where they differ."""

import itertools
import traceback
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

import zerolab
from support.references import Replicas, Tensors, copies, seeded
from support.seeding import seed_all
from support.whole_updates import together

WIDTH, BATCH, STEPS = 8, 4, 3
DEFAULTS = {"lr": 0.05, "weight_decay": 0.1}  # decay moves a parameter that should have been left alone

Losses = Callable[[nn.Module, torch.Tensor, int], Iterator[torch.Tensor | Callable[[], None]]]
"""A generator over what one rank takes backward in one step: losses, or functions that do it themselves."""


def micro_batch(step: int, rank: int) -> torch.Tensor:
    """The same numbers on every device, on this rank's."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, WIDTH, generator=generator).to(zerolab.device())


def on_device(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Have a model built on this rank's device."""
    return lambda: build().to(zerolab.device())


def passes(losses: Losses, model: nn.Module, step: int, rank: int) -> Iterator[None]:
    """Do one rank's forward and backward passes of one step, stopping after each backward."""
    generator = losses(model, micro_batch(step, rank), step)
    for index in itertools.count():
        seed_all(7919 * step + 101 * index + rank)
        loss = next(generator, None)
        if loss is None:
            return
        loss.backward() if isinstance(loss, torch.Tensor) else loss()
        yield


def train_plain(
    build: Callable[[], nn.Module],
    losses: Losses,
    world_size: int,
    steps: int = STEPS,
    groups: Callable[[nn.Module], list[dict]] | None = None,
    precision: str = "fp32",
) -> Tensors:
    """The parameters by name after training in this process alone, for ``world_size`` ranks.

    Args: groups: parameter groups with optimizers of their own.
    """
    optimizer = torch.optim.AdamW if groups is None else together
    replicas = Replicas(on_device(build), world_size, optimizer, groups, precision, **DEFAULTS)
    replicas.train(lambda model, step, rank: passes(losses, model, step, rank), steps)
    return copies(replicas.whole.named_parameters())


def train_sharded(build: Callable[[], nn.Module], losses: Losses, stage: int, steps: int = STEPS, **settings):
    """The parameters by name after training as one rank of the process group."""
    model = seeded(on_device(build))
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, **settings, **DEFAULTS)
    for step in range(steps):
        for _ in passes(losses, model, step, dist.get_rank()):
            pass
        optimizer.step()
        optimizer.zero_grad()
    return whole(model, optimizer)


def whole(model: nn.Module, optimizer: zerolab.ZeroOptimizer) -> Tensors:
    with optimizer.full_params():
        return copies(model.named_parameters())


def differing(ours: Tensors, theirs: Tensors) -> list[str]:
    """The parameters in which two runs differ, by name; NaN differs from everything."""
    assert ours.keys() == theirs.keys()
    return [name for name in theirs if not torch.equal(ours[name], theirs[name])]


def from_rank_0(compute: Callable[[], Tensors]) -> Tensors:
    """What rank 0 computes, on every rank. A reference trains as many replicas as there are ranks."""
    computed = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(computed)
    return computed[0]


def compare(make: Callable[[], tuple], stages: tuple[int, ...], **settings) -> dict[int, list[str] | str]:
    """On a rank: train the case plainly once and sharded at each stage; what differs or failed, by stage.

    ``make`` gives a function that builds the model, and the losses of one step.
    """
    build, losses = make()
    groups, precision = settings.get("params"), settings.get("precision", "fp32")
    expected = from_rank_0(
        lambda: train_plain(build, losses, dist.get_world_size(), groups=groups, precision=precision)
    )
    found: dict[int, list[str] | str] = {}
    for stage in stages:
        try:
            found[stage] = differing(train_sharded(build, losses, stage, **settings), expected)
        except Exception:
            found[stage] = traceback.format_exc()
    return found


def compare_all(cases: dict[str, Callable], stages: tuple[int, ...], **settings) -> dict[str, dict]:
    """On a rank: every case in turn. Its name is printed first, so that the output of a hang ends with it."""
    found = {}
    for name, make in cases.items():
        print(name, flush=True)
        found[name] = compare(make, stages, **settings)
    return found


def assert_same_bits(make, world_size: int = 2, stages: tuple[int, ...] = (0, 1, 2, 3), **settings) -> None:
    """Every stage on ``world_size`` ranks leaves the bits of plain training, on every rank."""
    for found in zerolab.launch(compare, world_size, make, stages, timeout=60, **settings):
        assert found == {stage: [] for stage in stages}
