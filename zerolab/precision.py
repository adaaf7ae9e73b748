"""Precision: the dtypes of a run's parameters and gradients, and whether it has fp32 masters."""

from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from torch.distributed import ReduceOp
from torch.utils._pytree import tree_map


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run. 16-bit parameters have fp32 masters; the owner of a slice keeps its master.

    Attributes: name: as ZeroOptimizer's keyword has it.
    """

    name: str
    parameters: torch.dtype
    gradients: torch.dtype

    @property
    def convention(self) -> str:
        """What `zerolab.memory` calls the bytes of it: fp16 takes as many as bf16."""
        return "mixed" if self.scales_loss else self.name

    @property
    def scales_loss(self) -> bool:
        """Whether gradients can be too small for their dtype."""
        return self.gradients == torch.float16

    @property
    def has_masters(self) -> bool:
        return self.parameters != torch.float32

    def cast(self, inputs):
        """The floating-point tensors of a forward's arguments, however nested, in the parameters' dtype."""
        if not self.has_masters:
            return inputs
        return tree_map(self._cast_leaf, inputs)

    def _cast_leaf(self, leaf):
        """Return a tensor that was cast, or a copy of a dataclass whose fields were."""
        if is_dataclass(leaf) and not isinstance(leaf, type):
            cast = {each.name: self.cast(getattr(leaf, each.name)) for each in fields(leaf) if each.init}
            return replace(leaf, **cast)
        return leaf.to(self.parameters) if _is_float(leaf) else leaf

    def lowers(self, dtype: torch.dtype) -> bool:
        """Return whether tensors of ``dtype`` are to be kept in the parameters' dtype instead."""
        return dtype == torch.float32 and self.has_masters


PRECISIONS = {
    "fp32": Precision("fp32", torch.float32, torch.float32),
    "mixed": Precision("mixed", torch.bfloat16, torch.bfloat16),
    "mixed_fp32_grads": Precision("mixed_fp32_grads", torch.bfloat16, torch.float32),
    "mixed_fp16": Precision("mixed_fp16", torch.float16, torch.float16),
}
"""Bytes per parameter, gradient and optimizer state with Adam: 4+4+8, 2+2+12, 2+4+12, 2+2+12."""


def _is_float(leaf) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def reduce_op(dtype: torch.dtype) -> ReduceOp.RedOpType:
    """Return what gradients of ``dtype`` are reduced to over the ranks: the sum in fp32, the mean in 16 bits.

    An fp32 sum is kept and divided once, after the last micro-batch. Sixteen bits are too few to hold a sum:
    such gradients are added up in fp32, divided, and rounded once, in each reduction on gloo.
    """
    return ReduceOp.AVG if dtype.itemsize < 4 else ReduceOp.SUM
