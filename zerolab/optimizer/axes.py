"""Axes: the groups of ranks that a training spans, data-parallel and tensor-parallel.

Without tensor parallelism there is one. With it a rank is in two groups. What concerns the whole model
concerns both: a norm, whether to skip a step, a checkpoint.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolab.checkpointing import Checkpointing
from zerolab.collectives import Comm, connect
from zerolab.storages import MemoryMeter
from zerolab.tensor_parallel import ParallelLinear, Split, TensorParallel
from zerolab.trace import Trace


@dataclass(frozen=True)
class Axes:
    """The groups of ranks of one training.

    Attributes:
        comms: the data-parallel ranks, and the tensor-parallel ones where there are any.
        everyone: the ranks of both.
        parallel: the tensor-parallel ranks, or None.
        splits: how each parameter that is cut was cut. Others are the same on all tensor-parallel ranks.
    """

    comms: tuple[Comm, ...]
    everyone: Comm
    parallel: TensorParallel | None
    splits: dict[nn.Parameter, Split]

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts a parameter in norms, and stores it: one that is not cut counts once."""
        return self.parallel is None or self.parallel.rank == 0 or parameter in self.splits

    @property
    def size(self) -> int:
        """How many tensor-parallel ranks there are."""
        return 1 if self.parallel is None else self.parallel.size

    def parts(self, parameter: nn.Parameter) -> list[str]:
        """What follows the name of each rank's part in a checkpoint; nothing where there are no parts."""
        if parameter not in self.splits:
            return [""]
        return [f".part_{rank}_of_{self.size}" for rank in range(self.size)]

    def part(self, parameter: nn.Parameter) -> str:
        """The same for this rank."""
        if self.parallel is None or parameter not in self.splits:
            return ""
        return self.parts(parameter)[self.parallel.rank]

    def whole(self, parameter: nn.Parameter, values: Tensor) -> Tensor:
        """Return the whole parameter of this rank's ``values``. Comm: Ψ of it where it is cut."""
        if self.parallel is None or parameter not in self.splits:
            return values
        return self.parallel.whole(values, self.splits[parameter])

    def whole_shape(self, tensor: Tensor) -> torch.Size:
        """Return the shape that a parameter has when its parts are joined."""
        sizes = list(tensor.shape)
        if isinstance(tensor, nn.Parameter) and tensor in self.splits:
            sizes[self.splits[tensor].dim] *= self.size
        return torch.Size(sizes)


def axes_of(model: nn.Module, data_parallel: Comm, parallel: TensorParallel | None) -> Axes:
    """Return the axes of a training, after checking that they fit each other and the model.

    Comm: a few bytes a tensor-parallel rank.
    Raises: ValueError where they do not fit; TypeError for anything but a TensorParallel.
    """
    if parallel is not None and not isinstance(parallel, TensorParallel):
        raise TypeError(
            f"tensor_parallel is {type(parallel).__name__}: pass the TensorParallel that parallelize() was "
            "given, or None"
        )
    layers = [module for module in model.modules() if isinstance(module, ParallelLinear)]
    if {layer.parallel for layer in layers} != {parallel} - {None}:
        cut_for = "is not cut" if not layers else f"was cut for {layers[0].parallel.size} ranks"
        raise ValueError(
            f"the model {cut_for} and tensor_parallel is {parallel}: cut it with parallelize(model, "
            "parallel), and pass the same TensorParallel here"
        )
    _refuse_other_partitions(model, parallel)
    if parallel is None:
        return Axes((data_parallel,), data_parallel, None, {})
    splits = {
        parameter: layer.splits[name]
        for layer in layers
        for name, parameter in layer.named_parameters(recurse=False)
        if name in layer.splits
    }
    everyone = connect(_group_of_all(data_parallel, parallel), data_parallel.device, Trace(), MemoryMeter())
    return Axes((data_parallel, parallel.comm), everyone, parallel, splits)


def _refuse_other_partitions(model: nn.Module, parallel: TensorParallel | None) -> None:
    """Refuse checkpointing whose inputs are divided over other ranks: these have inputs of their own."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Checkpointing) and value.partition not in (None, parallel):
                where = f"{name}.{attribute}" if name else attribute
                raise ValueError(
                    f"{where} of the model divides inputs over {value.partition.size} tensor-parallel ranks, "
                    f"and tensor_parallel is {parallel}: cut the model with parallelize(model, parallel) and "
                    "pass the same TensorParallel to both, or take Checkpointing(partition=None)"
                )


def _group_of_all(data_parallel: Comm, parallel: TensorParallel) -> dist.ProcessGroup:
    """Return the group of the ranks of both axes. Raises: ValueError where they are no mesh."""
    mine = dist.get_process_group_ranks(data_parallel.group)
    across = dist.get_process_group_ranks(parallel.comm.group)
    if set(mine) & set(across) != {dist.get_rank()}:
        raise ValueError(
            f"process_group has the ranks {mine} and the tensor-parallel group {across}: they may have this "
            "rank alone in common. Take both from one mesh, as in "
            'init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))'
        )
    places = torch.tensor([data_parallel.rank, data_parallel.world_size])
    found = parallel.comm.exchange(places, "places in the mesh")
    if bool((found != found[0]).any()):
        raise ValueError(
            f"the ranks of the tensor-parallel group {across} are at places {found.tolist()} (rank, world "
            "size) of their data-parallel groups, and must be at the same one: take both from one mesh"
        )
    parts = data_parallel.exchange(torch.tensor([parallel.rank]), "parts of the model").flatten().tolist()
    if len(set(parts)) > 1:
        raise ValueError(
            f"the ranks {mine} of process_group have the parts {parts} of the model (their numbers in their "
            "tensor-parallel groups), and must have the same one, because their gradients are averaged: take "
            "both groups from one mesh"
        )
    rows = parallel.comm.exchange(torch.tensor(mine), "ranks of the data-parallel groups")
    if rows.numel() != dist.get_world_size():  # a rehearsal has this rank's row for all; the number is right
        raise ValueError(
            f"process_group has {len(mine)} ranks and the tensor-parallel group {len(across)}, and their "
            f"product is not the {dist.get_world_size()} ranks of the run, so some would train apart: "
            "take both groups from one mesh of all ranks"
        )
    return cast(dist.ProcessGroup, dist.group.WORLD)
