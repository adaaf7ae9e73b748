"""Comm: the engine's three collectives. Each is recorded in the trace."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from zerolab.collectives.control import Control
from zerolab.storages import MemoryMeter
from zerolab.trace import CONTROL, Event, Trace

Op = ReduceOp.RedOpType
"""The type of ReduceOp.SUM and ReduceOp.AVG."""

GRADIENTS_FROM = 2**18
"""Units have indices below this; gradients that are sent as a subject of their own, from here on."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the same memory as bytes, so that gloo can send dtypes that it does not know."""
    return tensor.view(torch.uint8)


class Subject(Protocol):
    """What a message is about, for its tag and for the trace; a FlatUnit is one."""

    name: str
    index: int
    numel: int

    @property
    def cuts(self) -> Sequence[int] | None: ...

    def describe(self, part: slice) -> tuple[str, ...]:
        """The parameter slices in that part of the flat buffer."""


@dataclass(eq=False)
class Work:
    """A collective under way. Its result may be read, and its buffers freed, after `wait`.

    Attributes: waits: functions that return when a part of the collective is done. actions: what follows.
    """

    waits: list[Callable[[], object]] = field(default_factory=list)
    actions: list[Callable[[], "Work | None"]] = field(default_factory=list)

    def wait(self) -> None:
        """Wait for the collective, and for all that is chained to it.

        A second wait returns at once, or raises again what the first one raised.
        """
        while self.advance():
            pass

    def advance(self) -> bool:
        """Wait for the collective, then run what is chained to it, until that starts another collective.

        Returns whether it did: then that one is under way, and this work is a handle to it.
        """
        while self.waits:
            self.waits[0]()
            del self.waits[0]
        while self.actions:
            following = self.actions.pop(0)()
            if following is not None:
                self.waits, self.actions = following.waits, following.actions + self.actions
                following.waits, following.actions = [], []  # its actions may refer to it: no cycle
                if self.waits:
                    return True
        return False

    def then(self, action: Callable[[], "Work | None"]) -> Self:
        """Chain ``action`` to this work. It may start another collective, whose Work is waited for before the
        next action.
        """
        self.actions.append(action)
        return self


class Comm(ABC):
    """One rank's end of a process group: who it is, and the collectives it takes part in.

    A collective that reduces returns what ``op`` asks for, in every dtype: ReduceOp.SUM, or ReduceOp.AVG for
    the mean. How 16-bit tensors are added up is for the subclass to say.

    Attributes:
        rank, world_size: this rank's number within the group, and the group's size.
        ranks: the group's ranks, by their numbers among all ranks.
        numbers: how errors call them: by their places among the ranks of the training.
        device: where the flat buffers are, and where a model on the meta device is given memory.
        control: small messages between CPUs.
        trace: every call is written into it.
        meter: it counts the bytes of messages under way.
        bucket_bytes: the most scratch that a reduction takes for one other rank's part of the result; None
            for as much as the part is large.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        trace: Trace,
        meter: MemoryMeter,
        control: Control,
        bucket_bytes: int | None = None,
    ):
        self.group, self.device = group, device
        self.control, self.bucket_bytes = control, bucket_bytes
        self.trace, self.meter = trace, meter
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.numbers: Sequence[int] = range(self.world_size)

    @abstractmethod
    def reduce_scatter(self, flat: torch.Tensor, unit: Subject, op: Op = ReduceOp.SUM) -> Work:
        """Reduce over the ranks. Each rank gets the result of its own shard, in place; the rest is undefined.

        Shapes: flat [world_size * shard]. Comm: (N-1)/N of the payload sent per rank.
        """

    @abstractmethod
    def all_gather(self, flat: torch.Tensor, unit: Subject) -> Work:
        """Send this rank's shard to every rank, and receive theirs into place.

        Shapes: flat [world_size * shard]. Memory: no scratch. Comm: (N-1)/N of the payload sent per rank.
        """

    @abstractmethod
    def all_reduce(self, flat: torch.Tensor, unit: Subject, op: Op = ReduceOp.SUM) -> Work:
        """Reduce over the ranks. Every rank gets the whole result. Comm: 2(N-1)/N of the payload per rank."""

    def shard_range(
        self, padded_numel: int, rank: int | None = None, cuts: Sequence[int] | None = None
    ) -> slice:
        """Return the part of a flat buffer that belongs to this rank, or to the rank given.

        Args: cuts: where the ranks' parts begin, as in `Subject`.
        """
        rank = self.rank if rank is None else rank
        if cuts is not None:
            return slice(cuts[rank], cuts[rank + 1])
        shard_numel = padded_numel // self.world_size
        return slice(shard_numel * rank, shard_numel * (rank + 1))

    def own(
        self, flat: torch.Tensor, rank: int | None = None, cuts: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return the shard of ``flat`` that belongs to this rank, or to the rank given, as a view."""
        return flat[self.shard_range(flat.numel(), rank, cuts)]

    def parts(self, flat: torch.Tensor, unit: Subject) -> Sequence[torch.Tensor]:
        """Return the shards of all ranks, as views."""
        if unit.cuts is None:
            return flat.chunk(self.world_size) if flat.numel() else [flat] * self.world_size
        return flat.split_with_sizes([stop - start for start, stop in pairwise(unit.cuts)])

    def broadcast(self, tensor: torch.Tensor, unit: Subject, source: int = 0) -> None:
        """Overwrite ``tensor`` with the source rank's, on every rank."""
        event = self._begin("broadcast", tensor, unit, passes=1)
        if self.world_size > 1 and tensor.numel():
            event.wire_bytes = tensor.nbytes * (self.rank == source)
            dist.broadcast(as_bytes(tensor), group=self.group, group_src=source)
        self.trace.finish(event)

    def check_same_collective(self, what: str) -> None:
        """See that every rank is about to do ``what``.

        Raises: RuntimeError where another rank does something else.
        """
        if self.world_size > 1:
            self.control.submit(what)()

    def exchange(self, message: torch.Tensor, about: str) -> torch.Tensor:
        """Every rank's small control message, as rows in rank order: shape [world_size, *message.shape].

        Args: about: what the message is about, the same on every rank.
        Comm: N-1 rows, in ceil(log2 N) messages.
        """
        rows = message.new_empty((self.world_size, *message.shape))
        rows[self.rank] = message
        wire_bytes = message.nbytes * (self.world_size - 1)
        event = self.trace.begin("exchange", about, message, wire_bytes=wire_bytes, phase=CONTROL)
        if self.world_size > 1:
            event.wire_bytes += self.control.check_bytes
            self.control.exchange(as_bytes(rows.view(self.world_size, -1)), about)
        self.trace.finish(event)
        return rows

    def maximum(self, message: torch.Tensor, about: str) -> torch.Tensor:
        """The elementwise maximum of every rank's small control message. Args: about: as of `exchange`.

        Shapes: message [bytes]. Comm: the message, ceil(log2 N) times.
        """
        found, rounds = message.clone(), self.control.rounds
        event = self.trace.begin("exchange", about, message, wire_bytes=rounds * found.nbytes, phase=CONTROL)
        if self.world_size > 1:
            event.wire_bytes += self.control.check_bytes
            self.control.maximum(found, about)
        self.trace.finish(event)
        return found

    def _begin(self, op: str, flat: torch.Tensor, unit: Subject, passes: int) -> Event:
        """Open the event. ``passes`` is how often the paper counts the payload: 2 for an all-reduce.

        The slices noted are this rank's: the part of the result it gets, or the part it sends.
        """
        cut = op in ("reduce_scatter", "all_gather")
        mine = self.shard_range(flat.numel(), cuts=unit.cuts) if cut else slice(0, flat.numel())
        logical_bytes = passes * unit.numel * flat.element_size()
        return self.trace.begin(
            op, unit.name, flat, unit.describe(mine), logical_bytes=logical_bytes, ranks=self.ranks
        )
