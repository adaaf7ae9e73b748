"""Measure what each contestant holds at its peak, and what it sends, one contestant a launch.

All are measured in the same way, from outside, because engines count their own memory in different ways.

Memory. On a CPU, the peak of resident memory (VmHWM, which Linux lets a process reset) above what was
resident before the model was built: parameters, gradients, optimizer state, buffers and activations
together. Before that the same engine trains a tiny model, so that libraries, threads and connections do not
count. On a GPU, the peak of torch's allocator over the same time.

Wire. The bytes that a rank gave to the kernel's write call during a step (wchar of /proc/self/io), which is
how gloo sends. On NCCL there is no such counter, and only zerolab's stages have a number: their own ledger's.
"""

import ctypes
import gc
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from zerolab.bench.contestants import Contestant, enter
from zerolab.bench.race import Batches, Settings, synchronize
from zerolab.devices import device
from zerolab.launcher import launch
from zerolab.models import GPT
from zerolab.parity.prediction import predict

STEPS = 4
_TINY = partial(GPT, width=16, depth=2, heads=2, context=16)


@dataclass(frozen=True)
class Footprint:
    """Bytes of one contestant, of the rank with most. None where this machine cannot tell.

    Attributes:
        peak_bytes: the most that was held at once, above what was there before the model.
        wire_bytes: sent in one step.
        states_bytes, formula_bytes: zerolab's census of parameters, gradients and optimizer state after a
            step, and what ZeRO's formula says of it; states_match tells whether each category agrees to the
            byte on every rank.
    """

    peak_bytes: int | None
    wire_bytes: int | None
    states_bytes: float | None = None
    formula_bytes: float | None = None
    states_match: bool | None = None


def weigh(settings: Settings, name: str) -> Footprint:
    """Train one contestant alone, in as few steps as show all it holds. Raises: WorkerError if it fails."""
    ranks = launch(_weigh, settings.world_size, settings, name, backend=settings.backend)
    matches = [rank.states_match for rank in ranks if rank.states_match is not None]
    return Footprint(
        _most(rank.peak_bytes for rank in ranks),
        _most(rank.wire_bytes for rank in ranks),
        _most(rank.states_bytes for rank in ranks),
        _most(rank.formula_bytes for rank in ranks),
        all(matches) if matches else None,
    )


def _weigh(settings: Settings, name: str) -> Footprint:
    """Measure on one rank."""
    torch.set_num_threads(settings.threads)
    _train(enter(name, _TINY, settings.update), Batches(_TINY, batch=1))
    batches = Batches(settings.build, settings.batch)
    before_bytes = _settled_bytes()
    contestant = enter(name, settings.build, settings.update)
    wire_bytes = _train(contestant, batches)
    if wire_bytes is None and contestant.zero is not None:
        wire_bytes = contestant.zero.trace.traffic().wire_bytes
    synchronize()
    now_bytes = peak_bytes()
    peak = None if before_bytes is None or now_bytes is None else now_bytes - before_bytes
    return Footprint(peak, wire_bytes, *_states(contestant, batches))


def _train(contestant: Contestant, batches: Batches) -> int | None:
    """Train for a few steps; return the bytes sent in the last one."""
    for step in range(STEPS):
        batch = batches.of(step)
        dist.barrier()
        before = written_bytes()
        contestant.step(batch)
        after = written_bytes()
    return None if before is None or after is None else after - before


def _states(contestant: Contestant, batches: Batches) -> tuple[float | None, float | None, bool | None]:
    """Of zerolab's own: the states in bytes after a step, the formula's number, and whether all agree."""
    zero = contestant.zero
    if zero is None:
        return None, None, None
    contestant.backward(contestant.loss(*batches.of(STEPS)))
    contestant.update()
    measured, predicted = zero.memory(), predict(zero, cast(int, contestant.stage))
    states_bytes = measured.params_bytes + measured.grads_bytes + measured.optimizer_bytes
    return states_bytes, predicted.memory.total_bytes, predicted.holds_memory(measured)


# What the system tells.


def _settled_bytes() -> int | None:
    """Give back what is free, forget the peak so far, and say what is in use."""
    gc.collect()
    if device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with suppress(OSError, AttributeError):  # malloc_trim is glibc's
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    except OSError:
        return None
    return _status_bytes("VmRSS")


def peak_bytes() -> int | None:
    """Return the peak of the memory since then."""
    if device().type == "cuda":
        return torch.cuda.max_memory_allocated()
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), None)


def written_bytes() -> int | None:
    """Return the bytes that this process passed to write(); None where ranks do not send through it."""
    if device().type == "cuda" or not os.path.exists("/proc/self/io"):
        return None
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


Bytes = TypeVar("Bytes", int, float)


def _most(values: Iterable[Bytes | None]) -> Bytes | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None
