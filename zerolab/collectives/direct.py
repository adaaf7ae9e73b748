"""The collectives as sends and receives, for gloo, and the sum in rank order that makes bits agree."""

from typing import final

import torch
import torch.distributed as dist

from zerolab.collectives.base import Comm, Subject, Work, as_bytes
from zerolab.collectives.rollcall import MESSAGE_BYTES, RollCall
from zerolab.precision import reduces_to_mean
from zerolab.trace import Event, Trace


@final
class DirectComm(Comm):
    """The collectives as sends and receives between every pair, for gloo: the same bits, the fewest bytes.

    Messages are tagged by unit, so two of equal size can never be taken for one another, and a roll call
    goes before each collective, so that ranks whose paths part are told so.
    """

    def __init__(self, group: dist.ProcessGroup, trace: Trace):
        super().__init__(group, trace, control=group)
        self._roll = RollCall(group)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def reduce_scatter(self, flat: torch.Tensor, unit: Subject) -> Work:
        """Send each rank its shard of my tensor, then add up, in rank order, what all sent me of mine.

        Memory: N-1 shards of scratch while under way.
        """
        event = self._begin("reduce_scatter", flat, unit, passes=1)
        roll = self._call_roll(event)
        scratch, handles = self._scatter(flat, unit, event)

        def finish() -> None:
            self._combine(flat, scratch)
            self.trace.finish(event)

        return Work([*roll, *handles], finish, scratch.nbytes)

    def all_gather(self, flat: torch.Tensor, unit: Subject) -> Work:
        """Send my shard to everybody, and receive theirs straight into place."""
        event = self._begin("all_gather", flat, unit, passes=1)
        roll = self._call_roll(event)
        return Work([*roll, *self._gather(flat, unit, event)], lambda: self.trace.finish(event))

    def all_reduce(self, flat: torch.Tensor, unit: Subject) -> Work:
        """The two halves back to back: the order of the sum, and so its bits, are reduce_scatter's."""
        event = self._begin("all_reduce", flat, unit, passes=2)
        roll = self._call_roll(event)
        scratch, handles = self._scatter(flat, unit, event)

        def finish() -> None:
            self._combine(flat, scratch)
            Work(self._gather(flat, unit, event)).wait()
            self.trace.finish(event)

        return Work([*roll, *handles], finish, scratch.nbytes)

    def assemble(self, what: str) -> int:
        if self.world_size == 1:
            return 0
        self._roll.begin(what).wait()
        return MESSAGE_BYTES

    def _call_roll(self, event: Event) -> list:
        """Post the roll call of a collective: what is to be waited for before its own messages."""
        if self.world_size == 1:
            return []
        event.control_bytes = MESSAGE_BYTES
        return [self._roll.begin(f"{event.op} of {event.unit}")]

    def _combine(self, flat: torch.Tensor, scratch: torch.Tensor) -> None:
        """Make of all ranks' parts of my shard their sum, or in 16 bits their mean."""
        combine = average_in_rank_order if reduces_to_mean(flat.dtype) else add_in_rank_order
        combine(self.own(flat), scratch, self.rank)

    def _scatter(self, flat: torch.Tensor, unit: Subject, event: Event) -> tuple[torch.Tensor, list]:
        """Post a reduce-scatter's messages; the rows where the others' parts will land, in rank order."""
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
        """Whom to send to and receive from, round by round: everybody once, nobody called by all at once."""
        rank, world_size = self.rank, self.world_size
        return [((rank + step) % world_size, (rank - step) % world_size) for step in range(1, world_size)]

    def _trade(self, outgoing, to: int, incoming, source: int, tag: int, event: Event) -> list:
        """Post one receive and one send; the bytes are counted here, from the tensor that is handed over."""
        if not outgoing.numel():
            return []
        event.wire_bytes += outgoing.nbytes
        return [
            dist.irecv(as_bytes(incoming), group=self.group, group_src=source, tag=tag),
            dist.isend(as_bytes(outgoing), group=self.group, group_dst=to, tag=tag),
        ]


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
