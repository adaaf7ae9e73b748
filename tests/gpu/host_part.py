"""What a step asks of the CPU and the GPU: lines in which the CPU waits, kernels, and the time to issue them.

On a GPU both come from CUDA and torch's profiler. On a CPU they come from the stand-in, so that the same code
is tried.
"""

import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from common import STAGES, launch, on_cuda, synchronize
from support.stand_in import counting, tensors_of
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zerolab
from zerolab import models

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import host_time

MEASURED_PRECISIONS = ("fp32", "mixed", "mixed_fp16")
WARM_UP = 3
ALLOWED = {"optimizer/gradients.py", "optimizer/loss_scale.py"}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def steps_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple, clip: bool
) -> Callable[[], None]:
    scale = getattr(optimizer, "scale", lambda loss: loss)

    def step() -> None:
        scale(model(*batch)).backward()
        if clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    synchronize()
    return step


# Waits.


@contextmanager
def _noting_waits(found: list[str]) -> Iterator[None]:
    """Note the line of the package, or of torch, where the CPU waits for the device."""

    def note(message, *_, **__) -> None:
        of_a_wait = "called a synchronizing CUDA operation" in str(message)
        if not of_a_wait:  # the mode itself warns, too: it is a prototype
            return
        stack = traceback.extract_stack()[:-1]
        ours = [each for each in stack if "/zerolab/" in each.filename]
        place = ours[-1] if ours else stack[-1]
        found.append(f"{place.filename.rpartition('/zerolab/')[2]}:{place.lineno} {place.line}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _waits(stage: int, precision: str) -> dict:
    """The lines in which one step with clipping waits, and the calls of CUDA's that a profile saw wait."""
    model = models.GPT(width=64, depth=3, heads=4, context=64).to(zerolab.device())
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, precision=precision)
    batch = (torch.zeros(1, 64, dtype=torch.long, device=zerolab.device()),) * 2
    step = steps_of(model, optimizer, batch, clip=True)
    if not on_cuda():
        with counting([*batch, *tensors_of(model, optimizer)]) as counts:
            step()
        return {"lines": [line.removeprefix("zerolab/") for _, line in counts.waits.elements()]}
    lines: list[str] = []
    with _noting_waits(lines):
        step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
    calls = Counter(event.name for event in profiler.events() if event.name in WAITS)
    return {"lines": lines, "calls": dict(calls)}


def _all_waits() -> dict:
    return {f"{stage} {each}": _waits(stage, each) for stage in STAGES for each in MEASURED_PRECISIONS}


def waits() -> dict:
    """The lines in which the CPU waits for the GPU in one step with clipping, on two ranks."""
    return launch(_all_waits, 2)[0]


def waits_missed(found: dict) -> list[str]:
    """One wait to clip, and in fp16 one for the scale. On a CPU the values of a unit are compared too."""
    missed = []
    for case, one in found.items():
        places = Counter(line.partition(":")[0] for line in one["lines"])
        allowed = ALLOWED if case.endswith("fp16") else ALLOWED - {"optimizer/loss_scale.py"}
        extra = {place: count for place, count in places.items() if place not in allowed or count > 1}
        if not on_gpus(one):
            extra.pop("storages.py", None)
        missed += [f"{case}: {place} waits {count} times" for place, count in extra.items()]
    return missed


def on_gpus(found: dict) -> bool:
    return "calls" in found


# Kernels.


def model_of_288_parameters() -> nn.Module:
    linears = lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    return nn.Sequential(*(linears() for _ in range(24)))


class Loss(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).float().square().mean()


def device_work(step: Callable[[], None]) -> dict:
    """The kernels and copies of one step on a GPU, and for how long at least one of them ran."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    on_device = [
        event
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)
    ]
    kernels = [event for event in on_device if not event.name.startswith(("Memcpy", "Memset"))]
    return {
        "kernels": len(kernels),
        "copies": len(on_device) - len(kernels),
        "busy_ms": busy_us([(each.time_range.start, each.time_range.end) for each in on_device]) / 1e3,
    }


def busy_us(intervals: list[tuple[float, float]]) -> float:
    """How long at least one was under way: streams that run beside each other count once."""
    busy, until = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        busy += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return busy


def _kernels(stage: int | None, precision: str) -> int:
    model = Loss(model_of_288_parameters()).to(zerolab.device())
    flags = {"lr": 1e-3, "fused": True}
    if stage is None:
        optimizer = torch.optim.AdamW(model.parameters(), **flags)
    else:
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, precision=precision, **flags)
    batch = (torch.ones(2, 64, device=zerolab.device()),)
    step = steps_of(model, optimizer, batch, clip=False)
    if on_cuda():
        return device_work(step)["kernels"]
    with counting([*batch, *tensors_of(model, optimizer)]) as counts:
        step()
    return counts.kernels.total()


def _all_kernels() -> dict[str, int]:
    found = {"plain": _kernels(None, "fp32")}
    return found | {
        f"{stage} {each}": _kernels(stage, each) for stage in STAGES for each in ("fp32", "mixed")
    }


def kernels() -> dict[str, int]:
    """Kernels of a step with fused AdamW on one rank, at 288 parameters in 24 units."""
    return launch(_all_kernels, 1)[0]


def kernels_missed(found: dict[str, int]) -> list[str]:
    """The targets: 1.1 times the plain loop's at stage 2 in fp32, and 1.3 times in mixed."""
    ratios = {case: found[case] / found["plain"] for case in ("2 fp32", "2 mixed")}
    bounds = {"2 fp32": 1.1, "2 mixed": 1.3}
    return [
        f"stage {case}: {ratio:.2f} times the plain loop's kernels, and the target is {bounds[case]}"
        for case, ratio in ratios.items()
        if ratio > bounds[case]
    ]


# Time.

HOST_MS = {"zerolab-0": 5, "zerolab-1": 5, "zerolab-2": 5, "zerolab-3": 8} | {
    f"zerolab-{stage}, mixed": 12 for stage in (0, 2, 3)
}
"""The targets: how much longer than the plain loop the CPU may take to issue a step."""


def host() -> dict[str, dict]:
    """Milliseconds in which the CPU issues a step of 288 small parameters, beside the plain loop's."""
    (ms,) = launch(host_time.measure, 1, 3)
    over = {name: each - ms[host_time.FLOOR] for name, each in ms.items()}
    return {
        name: {
            "ms": each,
            "over_plain_ms": over[name],
            "of_ddp": over[name] / over["ddp"],
            "of_fully_shard": over[name] / over["fully_shard"],
        }
        for name, each in ms.items()
    }


def host_missed(found: dict[str, dict]) -> list[str]:
    return [
        f"{name}: {found[name]['over_plain_ms']:.1f} ms over the plain loop, and the target is {bound} ms"
        for name, bound in HOST_MS.items()
        if found[name]["over_plain_ms"] > bound
    ]
