"""Memory: what the engine counts, beside what CUDA's allocator has given out, phase by phase."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from common import STAGES, launch, on_cuda, synchronize
from torch import nn

import zerolab
from zerolab import models
from zerolab.storages import MemoryMeter


@contextmanager
def _weighed(phase: str, meter: MemoryMeter, before: int, found: dict[str, dict]) -> Iterator[None]:
    """Note what the engine holds after a phase and held at most in it, and the same of the allocator."""
    meter.reset_peak()
    synchronize()
    if on_cuda():
        torch.cuda.reset_peak_memory_stats()
    yield
    synchronize()
    found[phase] = {
        "engine_bytes": meter.held_bytes,
        "engine_peak_bytes": meter.peak_bytes,
        "allocated_bytes": torch.cuda.memory_allocated() - before if on_cuda() else None,
        "allocated_peak_bytes": torch.cuda.max_memory_allocated() - before if on_cuda() else None,
    }


def _set_up_cublas() -> None:
    """cuBLAS has workspaces of the allocator's from its first product on, one for backward's thread too."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(64, 64, device=zerolab.device(), dtype=dtype)
        layer(torch.ones(64, 64, device=zerolab.device(), dtype=dtype)).sum().backward()


def _census(stage: int) -> dict[str, dict]:
    _set_up_cublas()
    batch = torch.zeros(1, 64, dtype=torch.long, device=zerolab.device())
    before = torch.cuda.memory_allocated() if on_cuda() else 0
    model = models.GPT(width=256, depth=8, heads=8, context=64).to(zerolab.device())
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, precision="mixed")
    found: dict[str, dict] = {}
    kept: list[torch.Tensor] = []
    phases: dict[str, Callable] = {
        "forward": lambda: kept.append(model(batch, batch)),
        "backward": lambda: kept.pop().backward(),
        "step": optimizer.step,
        "zero_grad": optimizer.zero_grad,
    }
    for _ in range(2):  # the first step makes the optimizer's state
        for name, phase in phases.items():
            with _weighed(name, optimizer.meter, before, found):
                phase()
    return found


def census() -> dict[str, dict]:
    """What the engine counts beside what CUDA's allocator has given out, by phase, on two ranks."""
    return {
        f"stage {stage}, {phase}": found
        for stage in STAGES
        for phase, found in launch(_census, 2, stage)[0].items()
    }


def census_missed(found: dict[str, dict]) -> list[str]:
    """Between steps the allocator has given out no more than the engine counts, but for 2 % of rounding."""
    missed = []
    for name, phase in found.items():
        allocated, counted = phase["allocated_bytes"], phase["engine_bytes"]
        if name.endswith("zero_grad") and allocated is not None and allocated > 1.02 * counted + 2**20:
            missed.append(f"{name}: {allocated:,} bytes are allocated, and {counted:,} are counted")
    return missed
