"""Save and load buffers. Each rank has its own, such as BatchNorm's running statistics."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from zerolab.checkpoint import records
from zerolab.checkpoint.records import Record
from zerolab.optimizer import Shard
from zerolab.storages import digest


def persistent(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that ``model.state_dict()`` has too, by name."""
    return {
        f"{prefix}.{name}".removeprefix("."): buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def require_dense(model: nn.Module) -> None:
    """Raises: ValueError for a buffer whose elements are not all stored one by one, such as a sparse one."""
    _refuse(model, _not_dense)


def require_storable(model: nn.Module) -> None:
    """Raises: ValueError for a buffer that is not dense, or whose elements share memory."""
    _refuse(model, lambda buffer: _not_dense(buffer) or _shared(buffer))


def require_writable(model: nn.Module) -> None:
    """Raises: ValueError for a buffer that a load could not write to."""
    _refuse(model, lambda buffer: _not_dense(buffer) or _shared(buffer) or _for_inference(buffer))


def _refuse(model: nn.Module, reason: Callable[[torch.Tensor], str]) -> None:
    for name, buffer in persistent(model).items():
        if why := reason(buffer):
            raise ValueError(f"buffer {name} {why}")


def _not_dense(buffer: torch.Tensor) -> str:
    if not (buffer.is_nested or buffer.is_quantized or buffer.layout != torch.strided):
        return ""
    kind = "quantized" if buffer.is_quantized else "nested" if buffer.is_nested else buffer.layout
    return (
        f"is {kind}, and a checkpoint stores dense buffers only: keep it dense, or register it with "
        "persistent=False"
    )


def _shared(buffer: torch.Tensor) -> str:
    steps = zip(buffer.stride(), buffer.shape, strict=True)
    if not (buffer.numel() and any(step == 0 and size > 1 for step, size in steps)):
        return ""
    return (
        "has elements that share memory, as expand() makes them, and a load could not write to it: register "
        "its .contiguous(), or register it with persistent=False"
    )


def _for_inference(buffer: torch.Tensor) -> str:
    if not buffer.is_inference():
        return ""
    return (
        "was made in inference_mode(), and a load could not write to it: make it outside, or register its "
        ".clone()"
    )


def digests(model: nn.Module) -> dict[str, bytes]:
    """Return a few bytes for each buffer, which differ where its values do."""
    return {name: digest(buffer) for name, buffer in persistent(model).items()}


def to_store(model: nn.Module, rank: int, on_rank_0: dict[str, bytes]) -> Iterator[tuple[str, Shard]]:
    """Rank 0's buffers; of another rank those that differ from them."""
    for name, buffer in persistent(model).items():
        if rank == 0 or digest(buffer) != on_rank_0[name]:
            yield key_of(name, rank), _shard(name, _flat(buffer))


@torch.no_grad()
def restore(model: nn.Module, rank: int, folder: Path, stored: dict[str, list[Record]]) -> None:
    """Overwrite the buffers with those of ``rank``. Memory: one buffer and two records."""
    for name, buffer in persistent(model).items():
        flat = torch.empty(buffer.numel(), dtype=buffer.dtype)
        key = key_of(name, rank if key_of(name, rank) in stored else 0)
        records.fill(folder, stored, [(key, _shard(name, flat))])
        buffer.copy_(flat.view(buffer.shape))


def key_of(name: str, rank: int) -> str:
    """Return the name under which a rank's buffer is stored."""
    return f"buffers.{rank}.{name}"


def _flat(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().cpu().contiguous().view(-1)


def _shard(name: str, flat: torch.Tensor) -> Shard:
    return Shard(name, None, flat.numel(), 0, flat)
