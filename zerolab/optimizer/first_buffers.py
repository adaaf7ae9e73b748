"""First buffers: ranks may build their model with other buffers, such as random features without a seed."""

import torch
from torch import Tensor, nn

from zerolab.collectives import Comm
from zerolab.engine.agreement import BUFFERS, difference_of
from zerolab.storages import digest
from zerolab.warn import warn_user


def warn_of_other_buffers(model: nn.Module, comm: Comm) -> None:
    """Warn on rank 0 where ranks have other buffers. Each rank keeps its own.

    Collective. Comm: 32 bytes, ceil(log2 N) times; the digests of all buffers where they differ.
    """
    named = [(name, buffer) for name, buffer in model.named_buffers() if _can_be_read(buffer)]
    lines = [f"{name} with the digest {digest(buffer).hex()[:16]}" for name, buffer in named]
    difference = difference_of(comm, BUFFERS, lines)
    if difference and comm.rank == 0:
        warn_user(difference)


def _can_be_read(buffer: Tensor) -> bool:
    odd = buffer.is_meta or buffer.is_nested or buffer.is_quantized
    return buffer.layout == torch.strided and not odd and buffer.numel() > 0
