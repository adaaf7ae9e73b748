"""Comm: the three collectives that the engine is made of, each written into the trace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from zerolab.trace import CONTROL, Event, Trace

GRADIENTS_FROM = 2**18
"""The indices of units end here; their gradients, as a subject of their own, have those from here on."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: what is only carried may be of any dtype, also one gloo does not know."""
    return tensor.view(torch.uint8)


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
    scratch: torch.Tensor | None = None

    @property
    def scratch_bytes(self) -> int:
        """What it holds beyond the tensor that was handed in."""
        return 0 if self.scratch is None else self.scratch.nbytes

    def wait(self) -> None:
        """Wait for the messages, then do what is left to do with them. A second wait returns at once."""
        handles, self.handles = self.handles, []
        for handle in handles:
            handle.wait()
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()
        self.scratch = None

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

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where a model that has no memory yet is given it."""

    @abstractmethod
    def reduce_scatter(self, flat: torch.Tensor, unit: Subject) -> Work:
        """Sum over the ranks; each is left with the sum of its own shard, in place, the rest spent.

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
            dist.broadcast(as_bytes(tensor), group=self.group, group_src=0)
        self.trace.finish(event)

    @abstractmethod
    def assemble(self, what: str) -> None:
        """See that every rank is about to do ``what``.

        Raises: RuntimeError where another does something else.
        """

    def exchange(self, message: torch.Tensor, about: str) -> torch.Tensor:
        """Every rank's small control message, as rows in rank order: shape [world_size, *message.shape].

        ``about``, what it is, has to be the same on every rank. It travels on the CPU's control group, so on
        GPUs it never makes the device wait.
        """
        rows = message.new_empty((self.world_size, *message.shape))
        rows[self.rank] = message
        wire_bytes = message.nbytes * (self.world_size - 1)
        event = self.trace.begin("exchange", about, message, wire_bytes=wire_bytes, phase=CONTROL)
        if self.world_size > 1:
            self._share(rows, event)
        self.trace.finish(event)
        return rows

    @abstractmethod
    def _share(self, rows: torch.Tensor, event: Event) -> None:
        """Fill in the other ranks' rows; what is sent beyond this rank's own is added to the event."""

    def _begin(self, op: str, flat: torch.Tensor, unit: Subject, passes: int) -> Event:
        """Open the event. ``passes`` is how often the paper counts the payload: 2 for an all-reduce.

        The slices noted are this rank's: the part of the sum it is left with, the part it gives.
        """
        mine = self.shard_range(flat.numel()) if passes == 1 else slice(0, flat.numel())
        logical_bytes = passes * unit.numel * flat.element_size()
        return self.trace.begin(op, unit.name, flat, unit.describe(mine), logical_bytes=logical_bytes)
