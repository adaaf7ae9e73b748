"""Checkpointing runs the blocks of a model so that only their inputs are kept."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from zerolab.checkpointing.hidden import is_activation, name_of, refuse_hidden
from zerolab.checkpointing.inputs import Kept, KeptCopy, KeptWhole
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
        Raises: ValueError for a tensor in the function's closure or inside an object, which would stay in
            memory whole; RuntimeError for a block that writes to its inputs, and in backward where ranks
            had different inputs.
        """
        if not torch.is_grad_enabled():
            return block(*args, **kwargs)
        inputs, structure = tree_flatten((args, kwargs))
        refuse_hidden(block, inputs)
        tensors = [each for each in inputs if is_activation(each)]
        versions = [each._version for each in tensors]
        run = _Run(block, structure, inputs, [self._keep(each) for each in inputs])
        del inputs
        # Of these checkpoint() learns whose random numbers to repeat. They have no elements.
        devices = [torch.empty(0, device=device) for device in dict.fromkeys(t.device for t in tensors)]
        output = checkpoint(run, *devices, use_reentrant=False)
        if [each._version for each in tensors] != versions:
            raise RuntimeError(
                f"{name_of(block)} writes to one of its inputs, so it would be computed from other values "
                "again: clone the input before the write"
            )
        return output

    def _keep(self, value: Any) -> Any:
        """Return what to keep of an input: of anything but an activation, the value itself.

        Raises: TypeError for a sparse input, which has several tensors to keep.
        """
        if not is_activation(value):
            return value
        if value.layout is not torch.strided:
            raise TypeError(
                f"an input {list(value.shape)} of a checkpointed block has the layout {value.layout}: pass "
                "input.to_dense(), or make it sparse inside the block"
            )
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
