"""Reduce-scatter, all-gather and all-reduce from nothing but send and receive: the textbook.

Ranks stand in a ring and talk to their neighbours only: each sends to the right and receives from the left.
The payload is cut into N chunks, and in N-1 rounds every chunk travels around the ring once, so a rank sends
(N-1)/N of the payload in each direction however many ranks there are. That is why rings carry the traffic of
data parallelism.

The engine itself uses `zerolab.collectives`, where the order of the sum is fixed and traces are written;
these are the versions to read, step through and time first. Source: ZeRO §7.1 (arXiv:1910.02054).
"""

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist

from zerolab.checks import whole

OnStep = Callable[[int, int, int, int], None]
"""Called after each round as on_step(round, chunk_sent, chunk_received, bytes_sent)."""


def chunks(numel: int, world_size: int) -> list[slice]:
    """Cut ``range(numel)`` into one slice a rank: even, but the first ``numel % world_size`` one longer.

    No element is left out and none stands in two chunks, for any length: shorter than the ring, too.
    Raises: TypeError, ValueError for anything but whole numbers, of 0 elements or more and 1 rank or more.
    """
    whole("numel", numel, least=0)
    whole("world_size", world_size)
    size, longer = divmod(numel, world_size)
    starts = [rank * size + min(rank, longer) for rank in range(world_size + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(starts)]


def reduce_scatter(tensor: torch.Tensor, group=None, on_step: OnStep | None = None) -> torch.Tensor:
    """Sum ``tensor`` over the ranks and leave each rank its own chunk of the sum, in place.

    In round s rank r passes on the partial sum of chunk r-s-1 and adds what arrives to its own copy of chunk
    r-s-2. A chunk starts at its owner's right-hand neighbour, visits everybody, and comes home complete.

    Shapes: tensor [numel] on every rank; returns this rank's chunk, a view of it. The other chunks hold
    partial sums. Memory: one chunk of scratch. Comm: (N-1)/N of the payload sent, and as much received, per
    rank. Raises: ValueError where the tensor is not one contiguous dimension.
    """
    rank, pieces = _place(tensor, group)
    world_size = len(pieces)
    arriving = torch.empty(pieces[0].stop, dtype=tensor.dtype, device=tensor.device)
    for step in range(world_size - 1):
        sent, received = (rank - step - 1) % world_size, (rank - step - 2) % world_size
        home = tensor[pieces[received]]
        landing = arriving[: home.numel()]
        _exchange(tensor[pieces[sent]], landing, rank, world_size, group)
        home += landing
        if on_step is not None:
            on_step(step, sent, received, tensor[pieces[sent]].nbytes)
    return tensor[pieces[rank]]


def all_gather(tensor: torch.Tensor, group=None, on_step: OnStep | None = None) -> None:
    """Give every rank every chunk: rank r's chunk of ``tensor`` counts on entry, the whole of it on return.

    In round s rank r passes on chunk r-s, its own first and then whatever arrived last.

    Shapes: tensor [numel] on every rank, filled in place. Memory: no scratch. Comm: (N-1)/N of the payload
    each way. Raises: ValueError where the tensor is not one contiguous dimension.
    """
    rank, pieces = _place(tensor, group)
    world_size = len(pieces)
    for step in range(world_size - 1):
        sent, received = (rank - step) % world_size, (rank - step - 1) % world_size
        _exchange(tensor[pieces[sent]], tensor[pieces[received]], rank, world_size, group)
        if on_step is not None:
            on_step(step, sent, received, tensor[pieces[sent]].nbytes)


def all_reduce(tensor: torch.Tensor, group=None, on_step: OnStep | None = None) -> None:
    """Leave the sum over the ranks on every rank: a reduce-scatter, then an all-gather of what it left.

    This seam is where ZeRO gets in: stage 1 updates the parameters between the two halves, and moves no byte
    more.

    Shapes: tensor [numel], in place. Memory: one chunk. Comm: 2(N-1)/N of the payload each way.
    """
    reduce_scatter(tensor, group, on_step)
    all_gather(tensor, group, on_step)


def _place(tensor: torch.Tensor, group) -> tuple[int, list[slice]]:
    """This rank's place in the ring, and the chunks the ring will carry."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"a ring cuts one contiguous dimension, and this tensor has shape {tuple(tensor.shape)} and "
            f"strides {tensor.stride()}: pass tensor.contiguous().view(-1)"
        )
    return dist.get_rank(group), chunks(tensor.numel(), dist.get_world_size(group))


def _exchange(outgoing: torch.Tensor, incoming: torch.Tensor, rank: int, world_size: int, group) -> None:
    """Send right while receiving from the left, as one batch: blocking calls would wait for each other.

    An empty chunk (more ranks than elements) is not sent; both neighbours know its length, so both skip it.
    """
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    messages = []
    if outgoing.numel():
        messages.append(dist.P2POp(dist.isend, outgoing, group=group, group_peer=right))
    if incoming.numel():
        messages.append(dist.P2POp(dist.irecv, incoming, group=group, group_peer=left))
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()
