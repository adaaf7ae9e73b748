"""Comm: the three collectives the engine is made of, on a process group, each written into the trace.

On gloo they are built from tagged sends and receives, for three reasons that were measured: torch's own gloo
reduce-scatter is an all-reduce plus a slice (twice the bytes); the pair built here takes about a third of the
time of torch's own pair; and only a sum written out in rank order gives the same bits at every stage. On any
other backend the native collective is used.

A tensor here is always a whole flat buffer of ``world_size`` equal shards, and the rank's own part of it is
`Comm.own(tensor)`. Results land in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, final

import torch
import torch.distributed as dist

from zerolab.trace import CONTROL, Event, Trace

# torch 2.13 renamed the two and warns at the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Subject(Protocol):
    """What a message is about, for its tag and for the trace; a FlatUnit is one."""

    name: str
    index: int
    numel: int

    def describe(self, piece: slice) -> tuple[str, ...]:
        """The parameter slices in that piece of the flat buffer."""


@dataclass
class Work:
    """A collective under way. Its result may be read, and its buffers let go, after `wait`."""

    handles: list = field(default_factory=list)
    finish: Callable[[], None] | None = None
    scratch_bytes: int = 0

    def wait(self) -> None:
        """Wait for the messages, then do what is left to do with them. A second wait returns at once."""
        handles, self.handles = self.handles, []
        for handle in handles:
            handle.wait()
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()
        self.scratch_bytes = 0

    def then(self, action: Callable[[], None]) -> Work:
        """The same work, with ``action`` to follow when it is done."""
        first = self.finish

        def both() -> None:
            if first is not None:
                first()
            action()

        self.finish = both
        return self


class Comm(ABC):
    """One rank's end of a process group: who it is, and the collectives it takes part in.

    Attributes: rank and world_size within the group; trace, which every call is written into.
    """

    def __init__(self, group: dist.ProcessGroup, trace: Trace, control: dist.ProcessGroup):
        self.group = group
        self.control = control
        self.trace = trace
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    @abstractmethod
    def reduce_scatter(self, flat: torch.Tensor, unit: Subject) -> Work:
        """Sum over the ranks; each is left with the sum of its own shard, in place. The rest of ``flat`` is
        spent.

        Shapes: flat [world_size * shard]. Comm: (N-1)/N of the payload sent per rank.
        """

    @abstractmethod
    def all_gather(self, flat: torch.Tensor, unit: Subject) -> Work:
        """Give everybody everybody's shard: on entry this rank's own counts, on return the whole.

        Shapes: flat [world_size * shard]. Memory: no scratch. Comm: (N-1)/N of the payload sent per rank.
        """

    @abstractmethod
    def all_reduce(self, flat: torch.Tensor, unit: Subject) -> Work:
        """Leave the sum over the ranks on every rank. Comm: 2(N-1)/N of the payload sent per rank."""

    def shard_range(self, padded_numel: int, rank: int | None = None) -> slice:
        """Which part of a flat buffer belongs to this rank, or to the one given."""
        shard_numel = padded_numel // self.world_size
        start = shard_numel * (self.rank if rank is None else rank)
        return slice(start, start + shard_numel)

    def own(self, flat: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """The shard of ``flat`` that belongs to this rank, or to the one given, as a view."""
        return flat[self.shard_range(flat.numel(), rank)]

    def broadcast(self, tensor: torch.Tensor, unit: Subject) -> None:
        """Overwrite ``tensor`` with rank 0's, on every rank."""
        event = self._begin("broadcast", tensor, unit, passes=1)
        if self.world_size > 1 and tensor.numel():
            event.wire_bytes = tensor.nbytes * (self.rank == 0)
            dist.broadcast(tensor, group=self.group, group_src=0)
        self.trace.finish(event)

    def exchange(self, message: torch.Tensor) -> torch.Tensor:
        """Every rank's small control message, as rows in rank order: shape [world_size, *message.shape].

        It travels on the CPU's control group, so on GPUs it never makes the device wait.
        """
        rows = message.new_empty((self.world_size, *message.shape))
        wire_bytes = message.nbytes * (self.world_size - 1)
        event = self.trace.begin("exchange", "all", message, wire_bytes=wire_bytes, phase=CONTROL)
        if self.world_size > 1:
            _all_gather_single(rows.view(-1), message.view(-1), group=self.control)
        else:
            rows[0] = message
        self.trace.finish(event)
        return rows

    def _begin(self, op: str, flat: torch.Tensor, unit: Subject, passes: int) -> Event:
        """Open the event. ``passes`` is how often the paper counts the payload: 2 for an all-reduce.

        The slices noted are this rank's: the part of the sum it is left with, the part it gives.
        """
        mine = self.shard_range(flat.numel()) if passes == 1 else slice(0, flat.numel())
        logical_bytes = passes * unit.numel * flat.element_size()
        return self.trace.begin(op, unit.name, flat, unit.describe(mine), logical_bytes=logical_bytes)


@final
class DirectComm(Comm):
    """The collectives as sends and receives between every pair, for gloo: the same bits, the fewest bytes.

    Messages are tagged by unit, so two of equal size can never be taken for one another.
    """

    def reduce_scatter(self, flat: torch.Tensor, unit: Subject) -> Work:
        """Send each rank its shard of my tensor, then add up, in rank order, what all sent me of mine.

        Memory: N-1 shards of scratch while under way.
        """
        event = self._begin("reduce_scatter", flat, unit, passes=1)
        scratch, handles = self._scatter(flat, unit, event)

        def finish() -> None:
            add_in_rank_order(self.own(flat), scratch, self.rank)
            self.trace.finish(event)

        return Work(handles, finish, scratch.nbytes)

    def all_gather(self, flat: torch.Tensor, unit: Subject) -> Work:
        """Send my shard to everybody, and receive theirs straight into place."""
        event = self._begin("all_gather", flat, unit, passes=1)
        return Work(self._gather(flat, unit, event), lambda: self.trace.finish(event))

    def all_reduce(self, flat: torch.Tensor, unit: Subject) -> Work:
        """The two halves back to back: the order of the sum, and so its bits, are reduce_scatter's."""
        event = self._begin("all_reduce", flat, unit, passes=2)
        scratch, handles = self._scatter(flat, unit, event)

        def finish() -> None:
            add_in_rank_order(self.own(flat), scratch, self.rank)
            Work(self._gather(flat, unit, event)).wait()
            self.trace.finish(event)

        return Work(handles, finish, scratch.nbytes)

    def _scatter(self, flat: torch.Tensor, unit: Subject, event: Event) -> tuple[torch.Tensor, list]:
        """Post the messages of a reduce-scatter; the rows where the other ranks' parts will land, in rank
        order.
        """
        scratch = flat.new_empty((self.world_size - 1, flat.numel() // self.world_size))
        handles = []
        for to, source in self._peers():
            landing = scratch[source - (source > self.rank)]
            handles += self._trade(self.own(flat, to), to, landing, source, 2 * unit.index, event)
        return scratch, handles

    def _gather(self, flat: torch.Tensor, unit: Subject, event: Event) -> list:
        """Post the messages of an all-gather."""
        handles = []
        for to, source in self._peers():
            handles += self._trade(
                self.own(flat), to, self.own(flat, source), source, 2 * unit.index + 1, event
            )
        return handles

    def _peers(self) -> list[tuple[int, int]]:
        """Whom to send to and whom to receive from, round by round: everybody once, and nobody called by all
        at once.
        """
        rank, world_size = self.rank, self.world_size
        return [((rank + step) % world_size, (rank - step) % world_size) for step in range(1, world_size)]

    def _trade(self, outgoing, to: int, incoming, source: int, tag: int, event: Event) -> list:
        """Post one receive and one send; the bytes are counted here, from the tensor that is handed over."""
        if not outgoing.numel():
            return []
        event.wire_bytes += outgoing.nbytes
        return [
            dist.irecv(incoming, group=self.group, group_src=source, tag=tag),
            dist.isend(outgoing, group=self.group, group_dst=to, tag=tag),
        ]


@final
class NativeComm(Comm):
    """The backend's own collectives, for NCCL: asynchronous on its own stream, ordered against the current
    one.

    What is handed over is counted as a ring sends it, (N-1)/N of it a pass.
    """

    def reduce_scatter(self, flat: torch.Tensor, unit: Subject) -> Work:
        """The native reduce-scatter, in place: the output is this rank's own slice of the input."""
        return self._call(
            "reduce_scatter",
            flat,
            unit,
            1,
            lambda: _reduce_scatter_single(self.own(flat), flat, **self._options),
        )

    def all_gather(self, flat: torch.Tensor, unit: Subject) -> Work:
        """The native all-gather, in place: the input is this rank's own slice of the output."""
        return self._call(
            "all_gather", flat, unit, 1, lambda: _all_gather_single(flat, self.own(flat), **self._options)
        )

    def all_reduce(self, flat: torch.Tensor, unit: Subject) -> Work:
        """The native all-reduce."""
        return self._call("all_reduce", flat, unit, 2, lambda: dist.all_reduce(flat, **self._options))

    @property
    def _options(self) -> dict:
        return {"group": self.group, "async_op": True}

    def _call(self, op: str, flat: torch.Tensor, unit: Subject, passes: int, start: Callable) -> Work:
        event = self._begin(op, flat, unit, passes)
        if self.world_size == 1 or not flat.numel():
            return Work(finish=lambda: self.trace.finish(event))
        event.wire_bytes = passes * flat.nbytes * (self.world_size - 1) // self.world_size
        return Work([start()], lambda: self.trace.finish(event))


def add_in_rank_order(own: torch.Tensor, others: torch.Tensor, rank: int) -> None:
    """Leave in ``own`` the sum over all ranks, added from rank 0 upwards, as a single process would have.

    Floating-point addition commutes but does not associate, so which rank's part comes first decides the last
    bit.

    Shapes: own [shard], in place; others [N-1, shard], the other ranks' parts in rank order, spent.
    """
    before, after = others[:rank], others[rank:]
    if rank > 0:
        partial = before[0]
        for part in before[1:]:
            partial += part
        own += partial
    for part in after:
        own += part


def connect(group: dist.ProcessGroup | None, trace: Trace) -> Comm:
    """The Comm for a process group, the default one when none is given.

    Comm: on other backends than gloo a second group is made for control messages, on CPUs. Raises:
    RuntimeError where torch.distributed was not initialised; ValueError where this rank is not a member.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "no process group: run inside zerolab.launch(fn, world_size), or under torchrun after "
            "zerolab.init_process_group(), which also makes a world of one"
        )
    group = group or dist.group.WORLD
    if dist.get_rank(group) < 0:
        raise ValueError(
            "this rank is not a member of the process_group given: build the optimizer on its members"
        )
    backend = dist.get_backend(group)
    if backend == "gloo":
        return DirectComm(group, trace, control=group)
    members: Sequence[int] = dist.get_process_group_ranks(group)
    control_backend = "gloo" if backend == "nccl" else backend
    control = dist.new_group(list(members), backend=control_backend, use_local_synchronization=True)
    return NativeComm(group, trace, control)
