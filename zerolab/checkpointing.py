"""Activation checkpointing: keep the inputs of a block, and compute its activations again in backward.

The inputs themselves grow with batch x sequence x hidden, and tensor parallelism leaves them whole on every
rank. So they can be partitioned over the tensor-parallel ranks (P_a), and each part can be moved to host
memory or to a file (P_a+cpu).

Source: Chen et al. (arXiv:1604.06174); ZeRO §6.1, partitioned activation checkpointing (arXiv:1910.02054).
"""

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from zerolab.tensor_parallel import TensorParallel
from zerolab.tier import CountingTier, Tier, check_offload, tier_of


class Checkpointing:
    """Runs blocks of a model so that only their inputs are kept from forward to backward.

        checkpointing = zerolab.Checkpointing(partition=parallel)
        stream = checkpointing(block, stream)        # in place of block(stream)

    Args:
        partition: the tensor-parallel ranks of the model. Each keeps its part of every input, and they gather
            the whole before they compute the block again. The inputs have to be the same on these ranks, as
            those of a block of a model that `parallelize` has cut are.
        offload: where the inputs are kept. None: on their device. "cpu": in host memory. "disk": in a file.
        offload_dir: for "disk", a folder on a disk of this machine. The file in it has no name.
        offload_bytes: for "disk", how many bytes this rank will keep there at a time, if you know: the blocks
            of the file are allocated now. `zerolab.residual.activation_checkpoints` computes them for a GPT.

    Attributes:
        held_bytes: what is kept on the device now.
        offloaded_bytes: what is kept elsewhere now.
        written_bytes, read_bytes: what was moved there and back, since this object was made.

    Memory: the inputs of each block, whole or 1/N of them; in backward the activations of one block. Without
        ``partition`` and ``offload`` the inputs themselves are kept, and not copies.
    Comm: with ``partition`` an all-gather of each input in backward. The all-reduces that a block's forward
        makes are repeated, but for what follows the last activation that is needed; after
        `torch.utils.checkpoint.set_checkpoint_early_stop` (False) all of them.
    Raises: TypeError and ValueError for anything else, and for a folder that cannot be written to; OSError
        for a disk that has no room, at once for ``offload_bytes``, and in forward for what goes beyond.
    """

    def __init__(
        self,
        partition: TensorParallel | None = None,
        offload: str | None = None,
        offload_dir: str | Path | None = None,
        offload_bytes: int = 0,
    ):
        if partition is not None and not isinstance(partition, TensorParallel):
            raise TypeError(
                f"partition is {type(partition).__name__}: pass the TensorParallel that parallelize() was "
                "given, or None to keep whole inputs"
            )
        check_offload(offload, offload_dir, offload_bytes)
        self.partition, self.offload = partition, offload
        self.offload_dir, self.offload_bytes = offload_dir, offload_bytes
        self._tier: Tier | None = self._tier_for(torch.device("cpu")) if offload == "disk" else None
        self._kept: weakref.WeakSet[Kept] = weakref.WeakSet()

    def __deepcopy__(self, memo) -> "Checkpointing":
        return self  # the copy of a model keeps its inputs in the same place

    def __reduce__(self) -> tuple:
        return Checkpointing, (self.partition, self.offload, self.offload_dir, self.offload_bytes)

    @property
    def held_bytes(self) -> int:
        return sum(each.nbytes for each in self._kept if not each.away)

    @property
    def offloaded_bytes(self) -> int:
        return sum(each.nbytes for each in self._kept if each.away)

    @property
    def written_bytes(self) -> int:
        return 0 if self._tier is None else self._tier.written_bytes

    @property
    def read_bytes(self) -> int:
        return 0 if self._tier is None else self._tier.read_bytes

    def __call__(self, block: Callable, *args: Any, **kwargs: Any) -> Any:
        """Return ``block(*args, **kwargs)``. Tensors are found in lists, tuples and dicts too.

        Memory: until backward the inputs, and no activation of the block.
        Raises: ValueError for a function that has tensors in its closure, which would stay in memory whole;
            RuntimeError for a block that writes to its inputs, and in backward where ranks had different
            inputs.
        """
        if not torch.is_grad_enabled():
            return block(*args, **kwargs)
        _refuse_captured(block)
        inputs, structure = tree_flatten((args, kwargs))
        tensors = [each for each in inputs if _is_activation(each)]
        versions = [each._version for each in tensors]
        run = _Run(block, structure, inputs, [self._keep(each) for each in inputs])
        del inputs
        # Of these checkpoint() learns whose random numbers to repeat. They have no elements.
        devices = [torch.empty(0, device=device) for device in dict.fromkeys(t.device for t in tensors)]
        output = checkpoint(run, *devices, use_reentrant=False)
        if [each._version for each in tensors] != versions:
            raise RuntimeError(
                f"{_name_of(block)} writes to one of its inputs, so it would be computed from other values "
                "again: clone the input before the write"
            )
        return output

    def _keep(self, value: Any) -> Any:
        """Return what to keep of an input: of anything but an activation, the value itself."""
        if not _is_activation(value):
            return value
        if self._tier is None or (value.is_meta and not isinstance(self._tier, CountingTier)):
            self._tier = self._tier_for(value.device)
        plain = self.partition is None and self._tier is None
        kept = KeptWhole(value) if plain else KeptCopy(value, self.partition, self._tier)
        self._kept.add(kept)
        return kept

    def _tier_for(self, device: torch.device) -> Tier | None:
        return tier_of(self.offload, self.offload_dir, device, lambda: self.offload_bytes)


class _Run:
    """A block's computation: first with the inputs it was called with, then with those that were kept."""

    def __init__(self, block: Callable, structure: TreeSpec, inputs: list, kept: list):
        self.block, self.structure, self.kept = block, structure, kept
        self.inputs: list | None = inputs

    def __call__(self, *devices: Tensor) -> Any:
        inputs, self.inputs = self.inputs, None  # no reference is left to them
        if inputs is None:
            inputs = [each.restore() if isinstance(each, Kept) else each for each in self.kept]
        args, kwargs = tree_unflatten(inputs, self.structure)
        return self.block(*args, **kwargs)


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
        self._layout, self._device = torch.empty_like(tensor, device="meta"), tensor.device
        self._requires_grad = tensor.requires_grad
        flat = tensor.detach().flatten()
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
            values = torch.empty_like(self._layout, device=self._device).copy_(values)
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


def _is_activation(value: object) -> bool:
    """A parameter is kept anyway, and a placeholder of one has no values."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def _hash(flat: Tensor) -> int | None:
    """Eight bytes of the values. Of a GPU's none are computed, as reading them would wait for it."""
    if flat.device.type != "cpu":
        return None
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    return int(torch.hash_tensor(real).item()) if real.numel() else 0


def _refuse_captured(block: Callable) -> None:
    found = next((each for each in _captured(block) if _is_activation(each)), None)
    if found is not None:
        raise ValueError(
            f"{_name_of(block)} has a tensor {list(found.shape)} in its closure, its defaults or its object, "
            "which checkpointing cannot take out of memory: pass it as an argument, as in "
            "checkpointing(block, stream, mask)"
        )


def _captured(block: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Everything that a function brings along, and what that brings along in its turn.

    That is what is in its closure, its defaults and a partial's arguments, and in the attributes of an object
    that is called, or whose method is. A module keeps what it has: its parameters, buffers and attributes.
    """
    seen = set() if seen is None else seen
    if id(block) in seen or isinstance(block, (nn.Module, type)):
        return
    seen.add(id(block))
    if isinstance(block, functools.partial):
        found = [block.func, *tree_leaves((block.args, block.keywords))]
    elif isinstance(block, types.MethodType):
        held = {} if isinstance(block.__self__, nn.Module) else getattr(block.__self__, "__dict__", {})
        found = [block.__func__, *tree_leaves(held)]
    elif isinstance(block, types.FunctionType):
        cells = [cell.cell_contents for cell in block.__closure__ or () if _is_filled(cell)]
        found = tree_leaves((cells, block.__defaults__ or (), block.__kwdefaults__ or {}))
    elif callable(block) and not isinstance(block, Tensor):
        found = tree_leaves(getattr(block, "__dict__", {}))
    else:
        return
    yield from found
    for each in found:
        yield from _captured(each, seen)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _name_of(block: Callable) -> str:
    return getattr(block, "__qualname__", type(block).__name__)
