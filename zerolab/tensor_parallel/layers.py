"""The two linear layers of tensor parallelism: one is cut by its outputs, the other by its inputs."""

import copy
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerolab.tensor_parallel.group import Split, TensorParallel


class ParallelLinear(nn.Module):
    """What both have: this rank's part of a linear layer.

    Attributes:
        parallel: the ranks that have the other parts.
        splits: by name, how each parameter that is cut was cut. Others are the same on every rank.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, parallel: TensorParallel, name: str, splits: dict[str, Split]):
        super().__init__()
        self.parallel, self.name, self.splits = parallel, name, splits
        self._take("weight", linear.weight)
        self._take("bias", linear.bias)
        on_meta = any(parameter.is_meta for parameter in linear.parameters())
        self._whole = [linear] if on_meta else []  # a list, so that it is no submodule of this one

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize this rank's part of a layer that was cut on the meta device.

        The whole layer draws its start values, and rank 0's are taken. So they are those that the model has
        without tensor parallelism.

        Memory: the whole layer, for a moment. Comm: Ψ of it, a broadcast.
        Raises: RuntimeError for a layer that was cut elsewhere, whose whole layer is not kept.
        """
        if not self._whole:
            raise RuntimeError(
                f"{self.name} was not on the meta device when parallelize() cut it, so its part cannot be "
                "initialized anew: initialize the model before it is cut"
            )
        whole: Any = copy.deepcopy(self._whole[0]).to_empty(device=self.weight.device)
        for values in whole.parameters():
            values.fill_(float("nan"))  # what its reset_parameters() leaves unwritten is found by this
        whole.reset_parameters()
        for name, parameter in self.named_parameters(recurse=False):
            values = getattr(whole, name)
            self.parallel.copy_from_rank_0(f"{self.name}.{name}", values)
            parameter.copy_(self._part(name, values))

    def _part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a parameter of the whole layer, or all of it where it is not cut."""
        if name not in self.splits:
            return whole
        return self.splits[name].part(whole.detach(), self.parallel.rank, self.parallel.size)

    def _take(self, name: str, whole: Tensor | None) -> None:
        """Make this rank's part of a parameter of the whole layer a parameter of this one."""
        if whole is not None and name in self.splits:
            whole = nn.Parameter(self._part(name, whole), requires_grad=whole.requires_grad)
        self.register_parameter(name, cast(nn.Parameter | None, whole))

    def extra_repr(self) -> str:
        return f"weight {list(self.weight.shape)}, rank {self.parallel.rank} of {self.parallel.size}"


class ColumnParallelLinear(ParallelLinear):
    """A linear layer of which each rank computes some of the outputs. Its input is the same on every rank.

    Shapes: weight [out / size, in], bias [out / size]; [..., in] → [..., out / size].
    Comm: nothing in forward; in backward an all-reduce of the input's gradient.
    Args: linear: the whole layer. sections: see `Split`.
    """

    def __init__(self, linear: nn.Linear, parallel: TensorParallel, name: str, sections: int):
        super().__init__(linear, parallel, name, {"weight": Split(0, sections), "bias": Split(0, sections)})

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.parallel.enter(x, self.name), self.weight, self.bias)


class RowParallelLinear(ParallelLinear):
    """A linear layer of which each rank has some of the inputs, and computes a part of every sum.

    The bias is the same on every rank and is added once, after the partial products were added up.

    Shapes: weight [out, in / size], bias [out]; [..., in / size] → [..., out].
    Comm: an all-reduce of the output in forward; nothing in backward.
    """

    def __init__(self, linear: nn.Linear, parallel: TensorParallel, name: str):
        super().__init__(linear, parallel, name, {"weight": Split(1)})

    def forward(self, x: Tensor) -> Tensor:
        product = self.parallel.leave(F.linear(x, self.weight), self.name)
        # under autocast the product is in 16 bits, and nn.Linear returns it so
        return product if self.bias is None else product + self.bias.to(product.dtype)
