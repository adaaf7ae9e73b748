"""A hostile backend: the native collectives over gloo, as late as NCCL's could be.

On a GPU a collective's result is there when the device has done it, which may be long after the call. Until
then its buffers must not be read, written or freed. Here the result appears when the work is waited for, and
not before: meanwhile the buffers hold NaN, and what somebody writes to them is an error at the wait. So a
wait that the engine forgets ends in NaN parameters, on a machine without a GPU.
"""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from zerolab import collectives
from zerolab.collectives import native

POISON_BYTE = 0xFF  # NaN in every floating-point dtype


class LateWork:
    """A collective under way: `wait` lets its result appear."""

    under_way = 0

    def __init__(self, op: str, poisoned: list[torch.Tensor], arrive: Callable[[], None]):
        self.op, self.poisoned, self.arrive = op, poisoned, arrive
        for tensor in poisoned:
            bytes_of(tensor).fill_(POISON_BYTE)
        LateWork.under_way += 1

    def wait(self) -> None:
        for tensor in self.poisoned:
            if tensor.numel() and not tensor.untyped_storage().nbytes():
                raise AssertionError(f"a buffer of {self.op} was freed before it was waited for")
            if not bool((bytes_of(tensor) == POISON_BYTE).all()):
                raise AssertionError(f"a buffer of {self.op} was written to before it was waited for")
        self.arrive()
        LateWork.under_way -= 1


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], list[torch.Tensor]]:
    """Start to collect every rank's copy of ``tensor``; returns a function that waits for them."""
    mine = tensor.detach().clone()
    copies = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather([bytes_of(each) for each in copies], bytes_of(mine), group=group, async_op=True)

    def wait() -> list[torch.Tensor]:
        work.wait()
        return copies

    return wait


def reduced(parts: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """In rank order; in 16 bits rounded once, so that results can be compared bit for bit."""
    dtype = torch.float32 if parts[0].dtype.itemsize < 4 else parts[0].dtype
    total = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        total += part
    return (total / len(parts) if op == ReduceOp.AVG else total).to(parts[0].dtype)


def reduce_scatter(output: torch.Tensor, flat: torch.Tensor, op=ReduceOp.SUM, group=None, async_op=False):
    wait, rank, numel = gathered(flat, group), dist.get_rank(group), output.numel()

    def arrive() -> None:
        output.copy_(reduced([each[rank * numel :][:numel] for each in wait()], op))

    return LateWork("reduce_scatter", [flat], arrive)


def all_gather(flat: torch.Tensor, own: torch.Tensor, group=None, async_op=False):
    """The own shard is only read, so it keeps its contents."""
    wait, rank, numel = gathered(own, group), dist.get_rank(group), own.numel()

    def arrive() -> None:
        flat.copy_(torch.cat(wait()))

    return LateWork("all_gather", [flat[: rank * numel], flat[(rank + 1) * numel :]], arrive)


def reduce_scatter_uneven(
    output: torch.Tensor, parts: list[torch.Tensor], op=ReduceOp.SUM, group=None, async_op=False
):
    """The parts lie one behind the other in one tensor, and the output is this rank's."""
    wait, rank, sizes = gathered(torch.cat(parts), group), dist.get_rank(group), [len(p) for p in parts]

    def arrive() -> None:
        output.copy_(reduced([each.split(sizes)[rank] for each in wait()], op))

    return LateWork("reduce_scatter", [part for part in parts if len(part)], arrive)


def all_gather_uneven(parts: list[torch.Tensor], own: torch.Tensor, group=None, async_op=False):
    """The own part is only read, so it keeps its contents."""
    rank, sizes = dist.get_rank(group), [len(part) for part in parts]
    padded = own.new_zeros(max(sizes))
    padded[: len(own)] = own
    wait = gathered(padded, group)
    others = [part for place, part in enumerate(parts) if place != rank and len(part)]

    def arrive() -> None:
        for part, values in zip(parts, wait(), strict=True):
            part.copy_(values[: len(part)])

    return LateWork("all_gather", others, arrive)


def all_reduce(flat: torch.Tensor, op=ReduceOp.SUM, group=None, async_op=False):
    wait = gathered(flat, group)
    return LateWork("all_reduce", [flat], lambda: flat.copy_(reduced(wait(), op)))


def all_to_all(
    rows: torch.Tensor,
    flat: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group=None,
    async_op=False,
):
    """Without sizes, equal parts. Each rank receives as much from everyone."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = input_split_sizes or [len(flat) // ranks] * ranks
    assert output_split_sizes in (None, [sizes[rank]] * ranks)
    wait = gathered(flat, group)

    def arrive() -> None:
        rows.copy_(torch.cat([each.split(sizes)[rank] for each in wait()]))

    return LateWork("all_to_all", [rows], arrive)


@contextmanager
def hostile_backend() -> Iterator[None]:
    """On a rank: every Comm that is made inside is a NativeComm over these collectives."""
    before = native.reduce_scatter_single, native.all_gather_single, native.dist, collectives.DirectComm
    native.reduce_scatter_single, native.all_gather_single = reduce_scatter, all_gather
    native.dist = types.SimpleNamespace(
        all_reduce=all_reduce,
        all_to_all_single=all_to_all,
        reduce_scatter=reduce_scatter_uneven,
        all_gather=all_gather_uneven,
    )
    collectives.DirectComm = native.NativeComm
    LateWork.under_way = 0
    try:
        yield
        assert LateWork.under_way == 0, f"{LateWork.under_way} collectives were never waited for"
    finally:
        native.reduce_scatter_single, native.all_gather_single, native.dist, collectives.DirectComm = before
