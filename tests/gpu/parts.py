"""The parts of a report on a machine with a GPU. Each is a function that returns what it measured.

All of them run on the CPU too, over gloo and with smaller models, so that they can be tried without a GPU.
"""

import contextlib
import os
import signal
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zerolab
from zerolab import models
from zerolab.bench.machine import describe
from zerolab.collectives.names import all_gather_single, reduce_scatter_single
from zerolab.launcher.gpus import visible_gpus
from zerolab.measure import MeasuredStates

STAGES = (0, 1, 2, 3)
LAUNCH_SECONDS = 120


def backend() -> str:
    return "nccl" if visible_gpus() else "gloo"


def launch(function: Callable, world_size: int, *args) -> list:
    return zerolab.launch(function, world_size, *args, backend=backend(), timeout=LAUNCH_SECONDS)


def on_cuda() -> bool:
    return zerolab.device().type == "cuda"


def synchronize() -> None:
    if on_cuda():
        torch.cuda.synchronize()


# What is here.


def versions() -> dict:
    """The machine, torch, NCCL and the GPUs."""
    found = describe() | {"torch": torch.__version__, "cuda": torch.version.cuda, "backend": backend()}
    if visible_gpus():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["gpu"] = [torch.cuda.get_device_name(index) for index in range(visible_gpus())]
    return found


# Ranks that share a GPU.


def _three_collectives() -> dict:
    size, rank = dist.get_world_size(), dist.get_rank()
    flat = torch.arange(size * 4, device=zerolab.device(), dtype=torch.float32) + rank
    reduced = flat.clone()
    dist.all_reduce(reduced)
    own, whole = flat.new_empty(4), torch.empty_like(flat)
    reduce_scatter_single(own, flat)
    all_gather_single(whole, own)
    return {"device": str(flat.device), "right": bool(torch.equal(whole, reduced))}


def collectives() -> dict:
    """Reduce-scatter, all-gather and all-reduce on 1, 2 and 4 ranks."""
    return {str(size): launch(_three_collectives, size) for size in (1, 2, 4)}


# Parity.


def parity() -> list[dict]:
    """Every stage on 1, 2 and 4 ranks in fp32, on 2 in 16 bits, against one process on the same device."""
    cases = [(stage, size, "fp32") for size in (1, 2, 4) for stage in STAGES]
    cases += [(stage, 2, precision) for precision in ("mixed", "mixed_fp16") for stage in STAGES]
    found = []
    for stage, size, precision in cases:
        report = zerolab.verify(stage, size, precision=precision, backend=backend())
        found.append(
            {
                "stage": stage,
                "world_size": size,
                "precision": precision,
                "backend": report.backend,
                "bit_identical": report.bit_identical,
                "max_abs_diff": report.max_abs_diff,
                "memory_matches": report.memory_matches,
                "traffic_matches": report.traffic_matches,
            }
        )
    return found


# Memory.


def _census(stage: int) -> dict:
    batch = torch.zeros(1, 64, dtype=torch.long, device=zerolab.device())
    before = torch.cuda.memory_allocated() if on_cuda() else 0
    model = models.GPT(width=256, depth=8, heads=8, context=64).to(zerolab.device())
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, precision="mixed")
    model(batch, batch).backward()
    optimizer.step()
    model(batch, batch).backward()
    states: MeasuredStates = optimizer.memory()
    synchronize()
    held = torch.cuda.memory_allocated() - before if on_cuda() else None
    return {"states_bytes": states.total_bytes, "allocated_bytes": held, "peak_bytes": states.peak_bytes}


def census() -> dict:
    """What the engine counts beside what CUDA's allocator has given out, on two ranks."""
    return {str(stage): launch(_census, 2, stage)[0] for stage in STAGES}


# Mistakes and faults.


def _on_the_cpu() -> str:
    optimizer = zerolab.ZeroOptimizer(nn.Linear(4, 4), torch.optim.SGD, stage=2, lr=0.1)
    return f"accepted, with a {type(optimizer.comm).__name__}"


def mismatch() -> dict:
    """A model on the CPU in a group that has NCCL too; one on a GPU in a group of gloo alone."""

    def on_gpu_with_gloo() -> str:
        try:
            zerolab.ZeroOptimizer(nn.Linear(4, 4).cuda(), torch.optim.SGD, stage=2, lr=0.1)
        except ValueError as error:
            return str(error)
        return "accepted"

    found = {"model on the CPU": launch(_on_the_cpu, 2), "model on a GPU": "no GPU"}
    if visible_gpus():
        found["model on a GPU"] = zerolab.launch(on_gpu_with_gloo, 2, backend="gloo", timeout=LAUNCH_SECONDS)
    return found


def _struck(kind: str, stage: int) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(zerolab.device())
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
    for step in range(3):
        if step == 1 and optimizer.rank == 1:
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "raise":
                raise ArithmeticError("on purpose")
            time.sleep(3600)
        model(torch.ones(2, 64, device=zerolab.device())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def faults() -> dict:
    """One of two ranks is killed, raises or hangs: whom the launch names, and after how many seconds."""
    found = {}
    for kind in ("kill", "raise", "hang"):
        began = time.monotonic()
        try:
            zerolab.launch(_struck, 2, kind, 2, backend=backend(), timeout=20 if kind == "hang" else 60)
            found[kind] = {"named": None}
        except zerolab.WorkerError as error:
            found[kind] = {"named": error.rank, "said": str(error).splitlines()[0]}
        except zerolab.LaunchTimeout as error:
            found[kind] = {"named": list(error.ranks), "said": str(error).splitlines()[0]}
        found[kind]["seconds"] = round(time.monotonic() - began, 2)
    return found


# Waits of the CPU for the GPU.


@contextlib.contextmanager
def _noting_waits(found: list[str]) -> Iterator[None]:
    """Note the line of the package, or of torch, where the CPU waits for the device."""

    def note(message, *_, **__) -> None:
        ours = [f for f in traceback.extract_stack() if "/zerolab/" in f.filename]
        place = ours[-1] if ours else traceback.extract_stack()[-3]
        found.append(f"{place.filename.rpartition('/zerolab/')[2]}:{place.lineno} {place.line}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _waits(stage: int, precision: str) -> list[str] | None:
    if not on_cuda():
        return None
    model = models.GPT(width=128, depth=4, heads=4, context=64).to(zerolab.device())
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, precision=precision)
    batch = torch.zeros(1, 64, dtype=torch.long, device=zerolab.device())
    found: list[str] = []
    for step in range(4):
        with _noting_waits(found) if step == 3 else contextlib.nullcontext():
            optimizer.scale(model(batch, batch)).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    return found


def waits() -> dict:
    """The lines in which the CPU waits for the GPU in one step with clipping, on two ranks."""
    cases = [(stage, precision) for stage in STAGES for precision in ("fp32", "mixed", "mixed_fp16")]
    return {f"{stage} {precision}": launch(_waits, 2, stage, precision)[0] for stage, precision in cases}


# Time.


def gpt_350m() -> nn.Module:
    """GPT-2 medium's shape on a GPU; on a CPU something small."""
    if on_cuda():
        return models.GPT(vocab=50_304, width=1024, depth=24, heads=16, context=1024)
    return models.GPT(width=64, depth=2, heads=2, context=64)


def _train_step(contestant: str, model: nn.Module) -> Callable[[torch.Tensor], None]:
    """One training step of an engine, all with fused Adam and bf16."""
    flags = {"lr": 1e-4, "fused": True}
    if contestant.startswith("zerolab"):
        stage = int(contestant[-1])
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, precision="mixed", **flags)
        loss = model
    elif contestant == "fully_shard":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(zerolab.device().type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        optimizer, loss = torch.optim.AdamW(model.parameters(), **flags), model
    else:
        wrapped = model if contestant == "plain" else nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), **flags)
        loss = torch.autocast(zerolab.device().type, torch.bfloat16)(wrapped)

    def step(batch: torch.Tensor) -> None:
        loss(batch, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _timed(contestant: str, steps: int) -> dict:
    model = gpt_350m().to(zerolab.device())
    step = _train_step(contestant, model)
    batch = torch.randint(50, (4, model.context), device=zerolab.device())
    for _ in range(3):
        step(batch)
    synchronize()
    if on_cuda():
        torch.cuda.reset_peak_memory_stats()
    seconds, host = [], []
    for _ in range(steps):
        began = time.perf_counter()
        step(batch)
        host.append(time.perf_counter() - began)
        synchronize()
        seconds.append(time.perf_counter() - began)
    found = {"step_ms": 1e3 * statistics.median(seconds), "host_ms": 1e3 * statistics.median(host)}
    if on_cuda():
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        found |= _kernels(step, batch)
    return found


def _kernels(step: Callable, batch: torch.Tensor) -> dict:
    """How many kernels a step starts, and how long they take together."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step(batch)
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return {"kernels": len(kernels), "busy_ms": sum(each.self_device_time_total for each in kernels) / 1e3}


def speed() -> dict:
    """A GPT of 350M parameters in bf16 on one rank: zerolab's stages, the plain loop, DDP and fully_shard."""
    names = ("plain", "ddp", "fully_shard", *(f"zerolab-{stage}" for stage in STAGES))
    return {name: launch(_timed, 1, name, 20)[0] for name in names}


PARTS: dict[str, tuple[Callable, int]] = {
    # each part and the seconds it may take: ten minutes in all
    "versions": (versions, 30),
    "collectives": (collectives, 60),
    "mismatch": (mismatch, 40),
    "faults": (faults, 90),
    "census": (census, 60),
    "waits": (waits, 80),
    "speed": (speed, 110),
    "parity": (parity, 120),
}
