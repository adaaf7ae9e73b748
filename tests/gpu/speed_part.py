"""Time: a GPT of 350M parameters in bf16, trained by zerolab's stages and by other engines."""

import gc
import itertools
import statistics
import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
from common import STAGES, launch, on_cuda, synchronize
from host_part import device_work
from torch import nn

import zerolab
from zerolab import models
from zerolab.launcher.gpus import visible_gpus

NO_ROOM = "out of memory"
OURS = tuple(f"zerolab-{stage}" for stage in STAGES)
SAVING = {"zerolab-2, offload": {"offload": "cpu"}, "zerolab-3, checkpointing": {}}
"""What takes less memory and more time; there is no target for these."""
CONTESTANTS = ("plain", "ddp", "ddp+zero", "fully_shard", *OURS, *SAVING)
FLAGS = {"lr": 1e-4, "fused": True}
WARM_UP, STEPS = 3, 10
BATCHES = (4, 16)
"""Sequences of a step. The CPU may be slower than the GPU with the smaller, and is not with the larger."""


def gpt_350m() -> nn.Module:
    """GPT-2 medium's shape on a GPU; on a CPU something small."""
    with zerolab.device():
        if on_cuda():
            return models.GPT(vocab=50_304, width=1024, depth=24, heads=16, context=1024)
        return models.GPT(width=64, depth=2, heads=2, context=64)


def _fully_shard(model: nn.Module) -> torch.optim.Optimizer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(zerolab.device().type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return torch.optim.AdamW(model.parameters(), **FLAGS)


def _train_step(contestant: str, model: nn.Module) -> Callable[[torch.Tensor], None]:
    """One training step of an engine, all with fused AdamW and bf16."""
    loss = model
    if contestant in (*OURS, *SAVING):
        settings = {"stage": int(contestant[len("zerolab-")]), "precision": "mixed"}
        settings |= SAVING.get(contestant, {})
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, **settings, **FLAGS)
        model.checkpointing = zerolab.Checkpointing() if "checkpointing" in contestant else None
    elif contestant == "fully_shard":
        optimizer = _fully_shard(model)
    else:
        wrapped = model if contestant == "plain" else nn.parallel.DistributedDataParallel(model)
        if contestant == "ddp+zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **FLAGS)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), **FLAGS)
        loss = torch.autocast(zerolab.device().type, torch.bfloat16)(wrapped)

    def step(batch: torch.Tensor) -> None:
        loss(batch, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _warmed_up(contestant: str, batch_size: int) -> Callable[[], None]:
    """A training step, after the first few."""
    torch.manual_seed(0)
    model = gpt_350m()
    step = _train_step(contestant, model)
    batch = torch.randint(50, (batch_size, model.context), device=zerolab.device())
    for _ in range(WARM_UP):
        step(batch)
    synchronize()
    return lambda: step(batch)


def _timed(contestant: str, batch_size: int) -> dict:
    """How long a step takes, how long the CPU issues it, and the most memory that the allocator gave out."""
    step = _warmed_up(contestant, batch_size)
    if on_cuda():
        torch.cuda.reset_peak_memory_stats()
    seconds, host = [], []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        host.append(time.perf_counter() - began)
        synchronize()
        seconds.append(time.perf_counter() - began)
    found = {"step_ms": 1e3 * statistics.median(seconds), "host_ms": 1e3 * statistics.median(host)}
    if on_cuda():
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


def _profiled(contestant: str, batch_size: int) -> dict:
    """What a step has the GPU do."""
    return device_work(_warmed_up(contestant, batch_size))


def _in_turn(measure: Callable[[str, int], dict]) -> dict[str, dict]:
    found = {}
    for batch_size, name in itertools.product(BATCHES, CONTESTANTS):
        case = f"{name}, batch {batch_size}"
        try:
            found[case] = measure(name, batch_size)
        except torch.OutOfMemoryError:
            found[case] = {"failed": NO_ROOM}
        except Exception:  # another engine may lack something here; the rest is measured all the same
            found[case] = {"failed": traceback.format_exc(limit=-3)}
        gc.collect()
        if on_cuda():
            torch.cuda.empty_cache()
    return found


def speed() -> dict[str, dict]:
    """A GPT of 350M parameters in bf16 on one rank a GPU: milliseconds, kernels and peak of each engine."""
    found = launch(_in_turn, max(1, visible_gpus()), _timed)[0]
    if visible_gpus():  # in other processes: once the profiler was used, it takes longer to issue a kernel
        for case, work in launch(_in_turn, visible_gpus(), _profiled)[0].items():
            found[case] |= work
    return found


def speed_missed(found: dict[str, dict]) -> list[str]:
    """The targets on a GPU: 1.03 times DDP's step at stages 0 to 2, and fully_shard's at stage 3."""
    missed = []
    for batch_size, name in itertools.product(BATCHES, OURS):
        other, bound = ("fully_shard", 1.0) if name == "zerolab-3" else ("ddp", 1.03)
        ours, theirs = (found[f"{each}, batch {batch_size}"] for each in (name, other))
        if ours.get("failed", NO_ROOM) != NO_ROOM:
            missed.append(f"{name} failed with a batch of {batch_size}")
        if "peak_bytes" not in ours or "failed" in theirs:
            continue
        ratio = ours["step_ms"] / theirs["step_ms"]
        if ratio > bound:
            missed.append(
                f"{name}: {ratio:.3f} times {other}'s step with a batch of {batch_size}, and the target is "
                f"{bound:.2f}"
            )
    return missed
