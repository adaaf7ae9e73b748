"""The collectives as sends and receives, for gloo, and the sum in rank order that makes bits agree."""

import itertools
import weakref
import zlib
from typing import final

import torch
import torch.distributed as dist

from zerolab.collectives.base import Comm, Subject, Work, as_bytes
from zerolab.collectives.courier import Courier, Job
from zerolab.collectives.rollcall import MESSAGE_BYTES, RollCall
from zerolab.precision import reduces_to_mean
from zerolab.trace import Event, Trace

_TAGS, _EXCHANGES = 2**20, 2**12
"""How many tags one Comm has for itself: two for each subject, a quarter of a million units and their
gradients; some for the exchanges of small messages, by what they are about, as those differ in size; and the
last for the roll call. The first 2**20 are left to the user.
"""

_comms: "weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count]" = weakref.WeakKeyDictionary()
"""How many Comms each group has had: several models on one group must not take each other's messages."""


@final
class DirectComm(Comm):
    """The collectives as sends and receives between every pair, for gloo: the same bits, the fewest bytes.

    Messages are tagged by unit, so two of equal size can never be taken for one another, and a roll call
    goes before each collective, so that ranks whose paths part are told so. A courier carries them out.
    """

    def __init__(self, group: dist.ProcessGroup, trace: Trace):
        super().__init__(group, trace, control=group)
        number = next(_comms.setdefault(group, itertools.count()))
        self._first_tag = (1 + number % 1023) * _TAGS
        self._roll = RollCall(group, self._first_tag + _TAGS - 1)
        self._courier = Courier()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def reduce_scatter(self, flat: torch.Tensor, unit: Subject) -> Work:
        """Send each rank its shard of my tensor, then add up, in rank order, what all sent me of mine.

        Memory: N-1 shards of scratch while under way.
        """
        scratch = self._scratch(flat)
        event = self._begin("reduce_scatter", flat, unit, passes=1)
        return self._start(event, self._reduce(flat, scratch, unit, event), scratch)

    def all_gather(self, flat: torch.Tensor, unit: Subject) -> Work:
        """Send my shard to everybody, and receive theirs straight into place."""
        event = self._begin("all_gather", flat, unit, passes=1)
        return self._start(event, self._gather(flat, unit, event))

    def all_reduce(self, flat: torch.Tensor, unit: Subject) -> Work:
        """The two halves back to back: the order of the sum, and so its bits, are reduce_scatter's."""
        scratch = self._scratch(flat)
        event = self._begin("all_reduce", flat, unit, passes=2)
        halves = itertools.chain(self._reduce(flat, scratch, unit, event), self._gather(flat, unit, event))
        return self._start(event, halves, scratch)

    def assemble(self, what: str) -> None:
        if self.world_size > 1:
            self._courier.carry(self._announced(what, iter([None]))).wait()

    def _share(self, rows: torch.Tensor, event: Event) -> None:
        event.wire_bytes += MESSAGE_BYTES
        swap = self._swap(as_bytes(rows.view(self.world_size, -1)), zlib.crc32(event.unit.encode()))
        self._courier.carry(self._announced(f"exchange of {event.unit}", swap)).wait()

    def _start(self, event: Event, collective: Job, scratch: torch.Tensor | None = None) -> Work:
        """Hand a collective to the courier. Alone in the world there is nobody to wait for: do it here."""
        noted = self._noted(collective, event)
        if self.world_size == 1:
            for _ in noted:
                pass
            return Work()
        event.control_bytes = MESSAGE_BYTES
        announced = self._announced(f"{event.op} of {event.unit}", noted)
        return Work([self._courier.carry(announced)], scratch=scratch)

    def _noted(self, collective: Job, event: Event) -> Job:
        """The collective, and its end in the trace."""
        yield from collective
        self.trace.finish(event)

    def _announced(self, what: str, collective: Job) -> Job:
        """The collective, with its roll call under way beside its first messages."""
        hear = self._roll.call(what)
        next(collective)
        yield
        hear()
        yield from collective

    def _scratch(self, flat: torch.Tensor) -> torch.Tensor:
        """Where the other ranks' parts of my shard land, a row for each, in rank order."""
        return flat.new_empty((self.world_size - 1, flat.numel() // self.world_size))

    def _reduce(self, flat: torch.Tensor, scratch: torch.Tensor, unit: Subject, event: Event) -> Job:
        """Everybody's part of my shard comes to me, mine of theirs goes to them; then I add mine up."""
        handles = []
        for to, source in self._peers():
            landing = scratch[source - (source > self.rank)]
            handles += self._trade(self.own(flat, to), to, landing, source, 2 * unit.index, event)
        yield from _arrival(handles)
        combine = average_in_rank_order if reduces_to_mean(flat.dtype) else add_in_rank_order
        combine(self.own(flat), scratch, self.rank)

    def _gather(self, flat: torch.Tensor, unit: Subject, event: Event) -> Job:
        """My shard goes to everybody, theirs come into place."""
        handles = []
        for to, source in self._peers():
            landing = self.own(flat, source)
            handles += self._trade(self.own(flat), to, landing, source, 2 * unit.index + 1, event)
        yield from _arrival(handles)

    def _swap(self, rows: torch.Tensor, subject: int) -> Job:
        """My row goes to everybody, theirs come into place."""
        tag = self._first_tag + _TAGS - 2 - subject % _EXCHANGES
        handles = []
        for to, source in self._peers():
            handles += self._post(rows[self.rank], to, rows[source], source, tag)
        yield from _arrival(handles)

    def _peers(self) -> list[tuple[int, int]]:
        """Whom to send to and receive from, round by round: everybody once, nobody called by all at once."""
        rank, world_size = self.rank, self.world_size
        return [((rank + step) % world_size, (rank - step) % world_size) for step in range(1, world_size)]

    def _trade(self, outgoing, to: int, incoming, source: int, tag: int, event: Event) -> list:
        """Post one receive and one send; the bytes are counted here, from the tensor that is handed over."""
        if not outgoing.numel():
            return []
        event.wire_bytes += outgoing.nbytes
        return self._post(as_bytes(outgoing), to, as_bytes(incoming), source, self._first_tag + tag)

    def _post(self, outgoing, to: int, incoming, source: int, tag: int) -> list:
        return [
            dist.irecv(incoming, group=self.group, group_src=source, tag=tag),
            dist.isend(outgoing, group=self.group, group_dst=to, tag=tag),
        ]


def _arrival(handles: list) -> Job:
    """What was posted, waited for when the courier comes back to it."""
    yield
    for handle in handles:
        handle.wait()


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


def average_in_rank_order(own: torch.Tensor, others: torch.Tensor, rank: int) -> None:
    """Leave in ``own`` the mean over all ranks: added in fp32 and rank order, divided, and rounded once.

    Memory: one shard in fp32, and one for the part that is being added.
    """
    total = torch.zeros_like(own, dtype=torch.float32)
    for part in (*others[:rank], own, *others[rank:]):
        total += part
    own.copy_(total.div_(len(others) + 1))
