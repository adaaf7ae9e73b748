"""Rehearse a step of the engine at any world size and model size, in one process without memory.

Tensors on the meta device have shapes and no contents; a fake process group has ranks and no messages.
With both, the engine that trains on real ranks runs its hooks, its stages and a stock optimizer for rank 0
of a thousand. What a rank would hold and send is then counted. No formula is used here.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from zerolab.engine.tensors import tensors_in
from zerolab.measure import MeasuredStates
from zerolab.optimizer import ZeroOptimizer
from zerolab.trace import Traffic


@dataclass(frozen=True)
class Rehearsal:
    """What rank 0 held after the step and sent in it, and its peak in each phase, without activations."""

    psi: int
    memory: MeasuredStates
    traffic: Traffic
    peak_by_phase: dict[str, int]


def rehearse(
    model_fn: Callable[[], nn.Module],
    world_size: int = 1024,
    stage: int = 3,
    precision: str = "mixed",
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam,
    inputs: Callable[[], object] | None = None,
    **defaults: Any,
) -> Rehearsal:
    """Run two training steps of ``model_fn()`` as one of ``world_size`` ranks, without data or peers.

    Args:
        model_fn: builds the model; its parameters are created on the meta device, so their values never
            exist.
        inputs: builds one rank's arguments for forward; by default a few tokens and targets, as for
            zerolab.models.GPT.
        defaults: the optimizer's keywords, and ZeroOptimizer's own.
    Memory: a few MB for objects and shapes, however large the model.
    Raises: RuntimeError where this process belongs to a process group already; ValueError and TypeError as
        ZeroOptimizer, and for a world size below 1.
    """
    with _fake_world(world_size):
        with torch.device("meta"):
            model = model_fn()
            arguments = _tokens() if inputs is None else inputs()
        psi = sum(parameter.numel() for parameter in model.parameters())
        optimizer = ZeroOptimizer(model, optimizer_class, stage=stage, precision=precision, **defaults)
        # The first step allocates the optimizer's state and learns the order to prefetch in.
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.scale(_loss(model, arguments)).backward()
            optimizer.step()
        peak_by_phase = dict(optimizer.meter.peak_by_phase)
        return Rehearsal(psi, optimizer.memory(), optimizer.trace.traffic(1), peak_by_phase)


@contextmanager
def _fake_world(world_size: int) -> Iterator[None]:
    """A default process group of that many ranks: this process is rank 0, and there are no others."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}: pass a whole number of 1 or more")
    if dist.is_initialized():
        raise RuntimeError(
            "this process belongs to a process group: rehearse in a process of its own, outside launch"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Sixteen tokens and their targets, whatever they are."""
    tokens = torch.zeros(1, 16, dtype=torch.long)
    return tokens, tokens


def _loss(model: nn.Module, arguments: object) -> torch.Tensor:
    """Return one number to differentiate: forward's own loss, or the sum of what it returns."""
    if isinstance(arguments, Mapping):
        output = model(**arguments)
    else:
        output = model(*arguments) if isinstance(arguments, tuple) else model(arguments)
    return torch.stack([each.float().sum() for each in tensors_in(output) if each.requires_grad]).sum()
