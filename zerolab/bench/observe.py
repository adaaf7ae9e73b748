"""Measure what an engine holds and sends, from outside, so that one count serves every engine.

`held_bytes` adds the sizes of live storages. `Ledger` counts the tensors that an engine passes to its process
groups. Neither uses an engine's own count. zerolab's optimizer is the exception: its collectives run on a
thread of their own, so its census and its trace are used.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerolab.bench.contestants import Contestant
from zerolab.storages import storage_bytes

# Of each collective's arguments: where the whole tensor is, and how often the paper counts it.
_PAYLOADS = {
    "allreduce": (0, 2),  # a reduce-scatter and an all-gather
    "broadcast": (0, 1),
    "reduce": (0, 1),
    "_allgather_base": (0, 1),
    "allgather": (0, 1),
    "allgather_into_tensor_coalesced": (0, 1),
    "_reduce_scatter_base": (1, 1),
    "reduce_scatter": (1, 1),
    "reduce_scatter_tensor_coalesced": (1, 1),
}


class Held(NamedTuple):
    """Bytes of live storages on this rank, by the categories of `zerolab.memory.model_states`."""

    params_bytes: float
    grads_bytes: float
    optimizer_bytes: float

    @property
    def total_bytes(self) -> float:
        return sum(self)


class Sent(NamedTuple):
    """One collective: its name, its bytes in the paper's count, and the ranks that take part."""

    op: str
    logical_bytes: int
    ranks: tuple[int, ...]


class Ledger(TorchDispatchMode):
    """Records the collectives that are called inside it: torch.distributed's are operators, which it sees.

    It is the count of torch's own engines. What gloo or NCCL then sends depends on their algorithms.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        op = func._opname.rstrip("_")
        if func.namespace == "c10d" and op in _PAYLOADS:
            place, times = _PAYLOADS[op]
            tensors = [leaf for leaf in tree_leaves(args[place]) if isinstance(leaf, Tensor)]
            self.sent.append(Sent(op, times * sum(t.nbytes for t in tensors), _ranks(args)))
        return func(*args, **(kwargs or {}))

    def bytes_by(self, contestant: Contestant) -> int:
        """All that a contestant sent inside the ledger, in its last step."""
        if contestant.zero is not None:
            return contestant.zero.trace.traffic().logical_bytes
        return sum(each.logical_bytes for each in self.sent)


def _ranks(args: Iterable) -> tuple[int, ...]:
    """Those of the process group among a collective's arguments."""
    objects = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
    group = next(each for each in objects if "ProcessGroup" in str(each._type()))
    return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))


def held_bytes(contestant: Contestant) -> Held:
    """Bytes of parameters, gradients and optimizer state; views of one storage count once.

    Left out: an optimizer's step counters, and buffers that only an engine's C++ code can reach.
    """
    if contestant.zero is not None:
        measured = contestant.zero.memory()
        return Held(measured.params_bytes, measured.grads_bytes, measured.optimizer_bytes)
    parameters = list(contestant.model.parameters())
    inner = getattr(contestant.optimizer, "optim", contestant.optimizer)  # of ZeroRedundancyOptimizer
    state = [value for values in inner.state.values() for value in values.values()]
    return Held(
        storage_bytes(_local(parameters)),
        storage_bytes(_local(p.grad for p in parameters)),
        storage_bytes(t for t in _local(state) if t is not None and t.dim() > 0),
    )


def _local(tensors: Iterable[object]) -> list[Tensor | None]:
    """This rank's part of each."""
    parts = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return [each for each in parts if isinstance(each, Tensor)]
