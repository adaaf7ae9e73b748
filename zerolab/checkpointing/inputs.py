"""Inputs of checkpointed blocks, as they are kept until backward: whole, in parts, or moved away."""

import weakref
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from zerolab.tensor_parallel import TensorParallel
from zerolab.tier import Tier


class Kept:
    """One input of a block, as it is kept until backward.

    Attributes:
        nbytes: how much of it is on this rank.
        away: whether that is not on the device of the input.
    """

    nbytes: int
    away = False

    def restore(self) -> Tensor:
        """Return the input again, apart from the graph that made it."""
        raise NotImplementedError


class KeptWhole(Kept):
    """The input itself."""

    def __init__(self, tensor: Tensor):
        self._tensor, self._version = tensor, tensor._version
        self.nbytes = tensor.nbytes

    def restore(self) -> Tensor:
        """Raises: RuntimeError if somebody wrote to the input after the block had run."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"an input {list(self._tensor.shape)} of a checkpointed block was changed in place after "
                "the block had run: clone it before the write"
            )
        return self._tensor.detach().requires_grad_(self._tensor.requires_grad)


class KeptCopy(Kept):
    """A copy of this rank's part of the input, or of the whole, on its device or outside it.

    Args:
        partition: the ranks that have the other parts, or None for the whole.
        tier: where the copy is, or None for the device.
    """

    def __init__(self, tensor: Tensor, partition: TensorParallel | None, tier: Tier | None):
        self._partition, self._tier = partition, tier
        self._layout = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self._device = tensor.device
        self._requires_grad = tensor.requires_grad
        flat = tensor.detach().resolve_conj().resolve_neg().flatten()
        self._hash = None if partition is None else _hash(flat)
        self._copy: Tensor | None = (flat if partition is None else partition.part(flat)).clone()
        self._numel, self.nbytes, self.away = self._copy.numel(), self._copy.nbytes, tier is not None
        if tier is not None:
            self._place = tier.place(self.nbytes)
            weakref.finalize(self, tier.give_back, self._place, self.nbytes)
            tier.write(self._place, self._copy.untyped_storage())
            self._copy = None

    def _part(self) -> Tensor:
        """Return what was copied, on the device."""
        if self._copy is not None:
            return self._copy
        part = torch.empty(self._numel, dtype=self._layout.dtype, device=self._device)
        cast(Tier, self._tier).read(self._place, part.untyped_storage())
        return part

    @torch.no_grad()
    def restore(self) -> Tensor:
        """Comm: an all-gather of it where it was partitioned.

        Raises: RuntimeError where the tensor-parallel ranks had different inputs.
        """
        flat = self._part()
        if self._partition is not None:
            whole = self._partition.gather(flat, "a checkpointed input", "backward")
            flat = whole[: self._layout.numel()]
            self._compare(flat, self._partition.size)
        values = flat.view(self._layout.shape)
        if not self._layout.is_contiguous():
            values = laid_out(values, self._layout)
        return values.requires_grad_(self._requires_grad)

    def _compare(self, flat: Tensor, ranks: int) -> None:
        """Raises: RuntimeError where the parts that were gathered are not of this rank's input."""
        if _hash(flat) != self._hash:
            raise RuntimeError(
                f"an input {list(self._layout.shape)} of a checkpointed block was not the same on all "
                f"{ranks} tensor-parallel ranks, and each kept a part of its own: give them the same batch, "
                "and the same seed if the model has dropout; or keep whole inputs with "
                "Checkpointing(partition=None)"
            )


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Dtypes that `torch.hash_tensor` does not take, as it takes none of 8-bit floats."""


def _hash(flat: Tensor) -> int | None:
    """Eight bytes of the values. Of a GPU's none are computed, as reading them would wait for it."""
    if flat.device.type != "cpu":
        return None
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    if real.dtype in _SIGNED or (real.is_floating_point() and real.itemsize == 1):
        real = real.view(_SIGNED.get(real.dtype, torch.int8))
    return int(torch.hash_tensor(real).item()) if real.numel() else 0


def laid_out(values: Tensor, layout: Tensor) -> Tensor:
    """Return the values with the strides of a layout, with its gaps and repeated elements.

    The order of a sum, and its last bits, depend on strides. Where elements overlap in another way than
    `expand()` makes them, the result has no gaps.
    """
    once = [1 if stride == 0 else size for size, stride in zip(layout.shape, layout.stride(), strict=True)]
    if not _are_apart(once, layout.stride()):
        return torch.empty_like(layout, device=values.device).copy_(values)
    placed = torch.empty_strided(once, layout.stride(), dtype=values.dtype, device=values.device)
    return placed.copy_(values[tuple(slice(0, size) for size in once)]).expand(layout.shape)


def _are_apart(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two elements have one place: each stride steps over all that smaller strides reach."""
    reached = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and stride < reached:
            return False
        reached += stride * (size - 1) if size > 1 else 0
    return True
