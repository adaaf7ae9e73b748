"""TensorParallel: the ranks that share one copy of the model, and Megatron's two operators, f and g."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from zerolab.collectives import connect
from zerolab.devices import device
from zerolab.storages import MemoryMeter
from zerolab.trace import Trace


@dataclass(frozen=True)
class Split:
    """How a parameter is cut over the ranks.

    Attributes:
        dim: the dimension that is cut.
        sections: into how many equal sections it is divided before each is cut: 3 for a weight that makes
            queries, keys and values, of each of which a rank has some heads.
    """

    dim: int
    sections: int = 1

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Return a copy of one rank's part of a whole parameter."""
        sections = whole.chunk(self.sections, self.dim)
        return torch.cat([section.chunk(size, self.dim)[rank] for section in sections], self.dim)

    def join(self, parts: list[Tensor]) -> Tensor:
        """Return the whole parameter of the parts of all ranks."""
        cut = [part.chunk(self.sections, self.dim) for part in parts]
        return torch.cat([piece for section in zip(*cut, strict=True) for piece in section], self.dim)


class Message:
    """Identifies an activation in the trace and in messages; a Comm calls it a subject."""

    index = 0  # one is sent at a time
    cuts: Sequence[int] | None = None

    def __init__(self, name: str, numel: int):
        self.name, self.numel = name, numel

    def describe(self, part: slice) -> tuple[str, ...]:
        return ()


class TensorParallel:
    """The ranks that share the matrix products of one copy of the model.

    Args:
        group: these ranks: one dimension of a mesh, as ``init_device_mesh(...)["tp"]``, or a process group.

    Attributes:
        rank, size: this rank's number in the group, and how many there are.
        comm: their collectives.
        trace: the events of these, apart from those of a ZeroOptimizer.
    Raises: TypeError for anything else; ValueError for a group or a mesh that this rank is not in, and for a
        mesh of several dimensions.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh):
        self.trace, self.meter = Trace(), MemoryMeter()
        self.comm = connect(_group_of(group), device(), self.trace, self.meter)
        self.rank, self.size = self.comm.rank, self.comm.world_size

    def __repr__(self) -> str:
        return f"a TensorParallel of {self.size} ranks"

    def __deepcopy__(self, memo) -> "TensorParallel":
        return self  # a copy of a model is cut over the same ranks

    def __reduce_ex__(self, protocol):
        raise RuntimeError(
            "a model that parallelize() has cut does not pickle, because each rank has a part of it: store "
            "it with zerolab.save(optimizer, path) or zerolab.export(optimizer, path)"
        )

    def sum(self, tensor: Tensor, name: str, phase: str = "forward") -> Tensor:
        """Return the sum over the ranks, in rank order, rounded once to the tensor's dtype.

        Args: name, phase: for the trace.
        Comm: 2Ψ of the tensor, an all-reduce. Memory: a copy, and N-1 parts of it until it is done.
        """
        numel = tensor.numel()
        flat = tensor.new_empty(self.size * math.ceil(numel / self.size))
        flat[:numel] = tensor.flatten()
        flat[numel:] = 0
        self.trace.phase = phase
        self.comm.all_reduce(flat, Message(name, numel)).wait()
        return flat[:numel].view(tensor.shape)

    def enter(self, tensor: Tensor, name: str) -> Tensor:
        """Megatron's f: the tensor itself, before a product that is cut. Its gradients are added up."""
        return _Enter.apply(tensor, self, name)

    def leave(self, tensor: Tensor, name: str) -> Tensor:
        """Megatron's g: add up the ranks' partial products. Their gradient is that of the sum."""
        return _Leave.apply(tensor, self, name)

    @torch.no_grad()
    def copy_from_rank_0(self, name: str, values: Tensor) -> None:
        """Overwrite the values of a parameter or a buffer with rank 0's. Comm: Ψ of it."""
        if not values.is_meta:
            received = values.detach().clone(memory_format=torch.contiguous_format).view(-1)
            self.comm.broadcast(received, Message(name, received.numel()))
            values.copy_(received.view(values.shape))

    @torch.no_grad()
    def whole(self, part: Tensor, split: Split) -> Tensor:
        """Return the whole tensor that every rank has a part of. Comm: Ψ of it, an all-gather."""
        flat = self.gather(part.flatten(), "a parameter", self.trace.phase)
        return split.join([each.view(part.shape) for each in flat.chunk(self.size)])

    def part(self, flat: Tensor) -> Tensor:
        """Return this rank's part of a flat tensor; its end is padded so that all parts have one size.

        Shapes: [numel] → [ceil(numel / size)], a view where it needs no padding.
        """
        numel = math.ceil(flat.numel() / self.size)
        part = flat[self.rank * numel : (self.rank + 1) * numel]
        return torch.cat([part, part.new_zeros(numel - part.numel())]) if part.numel() < numel else part

    def gather(self, part: Tensor, name: str, phase: str) -> Tensor:
        """Return the parts of all ranks, one after the other.

        Shapes: [numel] → [size * numel]. Comm: an all-gather. Args: name, phase: for the trace.
        """
        flat = part.new_empty(self.size * part.numel())
        self.comm.own(flat).copy_(part)
        self.trace.phase = phase
        self.comm.all_gather(flat, Message(name, flat.numel())).wait()
        return flat


def _group_of(ranks: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    """The process group of a mesh of one dimension, or the one that was passed, after checks."""
    example = 'init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]'
    outside = f"every rank needs one, as in {example}, whose sizes multiply to the number of ranks"
    if isinstance(ranks, DeviceMesh):
        if ranks.ndim != 1:
            raise ValueError(f"the mesh has {ranks.ndim} dimensions: pass one of them, as in {example}")
        if ranks.get_coordinate() is None:
            raise ValueError(f"this rank is not in the mesh of the ranks {ranks.mesh.tolist()}: {outside}")
        return ranks.get_group()
    if ranks is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"this rank is not a member of the group: {outside}")
    if not isinstance(ranks, dist.ProcessGroup):
        raise TypeError(
            f"group is {type(ranks).__name__}: pass the process group of the ranks that share one copy of "
            f"the model, as in {example}"
        )
    return ranks


class _Enter(torch.autograd.Function):
    """f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx, tensor: Tensor, parallel: TensorParallel, name: str) -> Tensor:
        ctx.parallel, ctx.name = parallel, name
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        return ctx.parallel.sum(gradient, f"gradient of {ctx.name}", "backward"), None, None


class _Leave(torch.autograd.Function):
    """g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx, tensor: Tensor, parallel: TensorParallel, name: str) -> Tensor:
        return parallel.sum(tensor, name)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        return gradient, None, None
