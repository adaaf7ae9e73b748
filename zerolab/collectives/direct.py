"""Collectives made of sends and receives, for gloo, with sums in rank order, for equal bits."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import final

import torch
from torch.distributed import ReduceOp

from zerolab.collectives.base import Comm, Op, Subject, Work, as_bytes
from zerolab.collectives.comm_thread import Collective
from zerolab.collectives.control import arrival
from zerolab.trace import Event

IN_ROUNDS_FROM = 2**19
"""Messages of at least so many bytes are sent in rounds: one ends before the next begins. In a round each
rank sends to one other rank, so no two messages share a link. If all go at once, they share links unevenly,
and in the end some links wait for others: docs/benchmarks.md has what this takes. Short ones are not worth
the wait between rounds.
"""


@final
class DirectComm(Comm):
    """The collectives as sends and receives between every pair of ranks, for gloo.

    Messages are tagged by unit, so two of equal size cannot be confused. Each collective is announced when it
    is issued and compared before its result is used, so that ranks that issue different ones get an error. A
    thread runs the collectives in their order. 16-bit tensors are added up in fp32 and rounded once.

    With ``bucket_bytes`` a shard is received and added up in parts, one after the other, in the same scratch.
    All-gathers receive into place and have none.
    """

    def reduce_scatter(self, flat: torch.Tensor, unit: Subject, op: Op = ReduceOp.SUM) -> Work:
        """Send each rank its shard of this tensor, then add up, in rank order, what all sent of this rank's.

        Memory: N-1 shards of scratch until the work is waited for, or N-1 times ``bucket_bytes`` at most.
        """
        event = self._begin("reduce_scatter", flat, unit, passes=1)
        if self.world_size == 1:
            return self._alone(event)
        scratch = self._scratch(flat, unit)
        return self._start(event, self._reduce(flat, scratch, unit, event, op), scratch)

    def all_gather(self, flat: torch.Tensor, unit: Subject) -> Work:
        """Send this rank's shard to every rank, and receive theirs into place."""
        event = self._begin("all_gather", flat, unit, passes=1)
        if self.world_size == 1:
            return self._alone(event)
        return self._start(event, self._gather(flat, unit, event))

    def all_reduce(self, flat: torch.Tensor, unit: Subject, op: Op = ReduceOp.SUM) -> Work:
        """The two halves in turn: the order of the sum, and so its bits, are reduce_scatter's."""
        event = self._begin("all_reduce", flat, unit, passes=2)
        if self.world_size == 1:
            return self._alone(event)
        scratch = self._scratch(flat, unit)
        halves = chain(self._reduce(flat, scratch, unit, event, op), self._gather(flat, unit, event))
        return self._start(event, halves, scratch)

    def _alone(self, event: Event) -> Work:
        """With one rank nothing is sent: the sum over the ranks, and their mean, is what is there."""
        self.trace.finish(event)
        return Work()

    def _start(self, event: Event, collective: Collective, scratch: torch.Tensor | None = None) -> Work:
        """Hand a collective to the thread."""
        finished = self._finished(collective, event)
        event.control_bytes = self.control.check_bytes
        work = Work([self.control.submit(f"{event.op} of {event.unit}", finished)])
        if scratch is not None:
            self.meter.report(work, scratch)
            work.then(partial(self._release, work, [scratch]))
        return work

    def _release(self, work: Work, scratch: list[torch.Tensor]) -> None:
        """Free the scratch buffer after its collective has finished."""
        scratch.clear()
        self.meter.report(work)

    def _finished(self, collective: Collective, event: Event) -> Collective:
        """The collective, and its end in the trace."""
        yield from collective
        self.trace.finish(event)

    def _scratch(self, flat: torch.Tensor, unit: Subject) -> torch.Tensor:
        """Where the other ranks' values of this rank's shard are received, a row for each, in rank order."""
        row_numel = self._row_numel(self.own(flat, cuts=unit.cuts))
        return flat.new_empty((self.world_size - 1, row_numel))

    def _row_numel(self, shard: torch.Tensor) -> int:
        """How many elements of a shard are received at a time from each rank.

        No more than the bucket can hold in fp32, in which 16 bits are added up.
        """
        if self.bucket_bytes is None:
            return shard.numel()
        return min(shard.numel(), self.bucket_bytes // max(4, shard.element_size()))

    def _reduce(
        self, flat: torch.Tensor, scratch: torch.Tensor, unit: Subject, event: Event, op: Op
    ) -> Collective:
        """From each rank receive its values of this rank's shard; send it those of its own; then reduce.

        So for each part of the shards that fits into the scratch. Messages of one tag arrive in the order
        they were sent, so those of all parts can have the unit's. Where shards are not equal, those that are
        smaller end before the others.
        """
        shards = [shard.split(self._row_numel(shard)) for shard in self.parts(flat, unit)]
        for parts in zip_longest(*shards, fillvalue=flat[:0]):
            own = parts[self.rank]
            rows = scratch[:, : own.numel()]
            landings = {source: rows[source - (source > self.rank)] for _, source in self.control.peers}
            yield from self._trade(parts, landings, 2 * unit.index, event)
            if own.numel():
                reduce_in_rank_order(own, rows, self.rank, op)

    def _gather(self, flat: torch.Tensor, unit: Subject, event: Event) -> Collective:
        """Send this rank's shard to every rank; receive theirs into place."""
        shards = self.parts(flat, unit)
        outgoing = [shards[self.rank]] * self.world_size
        yield from self._trade(outgoing, shards, 2 * unit.index + 1, event)

    def _trade(
        self,
        outgoing: Sequence[torch.Tensor],
        incoming: Sequence[torch.Tensor] | Mapping[int, torch.Tensor],
        tag: int,
        event: Event,
    ) -> Collective:
        """Send each rank its tensor of ``outgoing``, and receive from it into its tensor of ``incoming``.

        The bytes are counted here, from the tensors that are sent. Large messages go in rounds.
        """
        control, works = self.control, []
        for to, source in control.peers:
            sent, received = outgoing[to], incoming[source]
            event.wire_bytes += sent.nbytes
            works += control.post(as_bytes(sent), to, as_bytes(received), source, control.first_tag + tag)
            if max(sent.nbytes, received.nbytes) >= IN_ROUNDS_FROM:
                yield from arrival(works)
                works.clear()
        yield from arrival(works)


def reduce_in_rank_order(
    own: torch.Tensor, others: torch.Tensor | list[torch.Tensor], rank: int, op: Op
) -> None:
    """Leave in ``own`` the sum over all ranks, or their mean for ReduceOp.AVG, added from rank 0 upwards.

    16-bit tensors are added up in fp32 and rounded once: sixteen bits are too few to hold the sum and to be
    divided after it.

    Shapes: own [shard], in place; others [N-1, shard], the other ranks' parts in rank order, undefined after
    it.
    Memory: for 16 bits one shard in fp32, and one for the part that is being added.
    """
    world_size = len(others) + 1
    if own.dtype.itemsize < 4:
        total = torch.zeros_like(own, dtype=torch.float32)
        for part in (*others[:rank], own, *others[rank:]):
            total += part
        own.copy_(total.div_(world_size) if op == ReduceOp.AVG else total)
        return
    add_in_rank_order(own, others, rank)
    if op == ReduceOp.AVG:
        own /= world_size


def add_in_rank_order(own: torch.Tensor, others: torch.Tensor | list[torch.Tensor], rank: int) -> None:
    """Leave in ``own`` the sum over all ranks, added from rank 0 upwards, as a single process would add them.

    Floating-point addition is commutative but not associative, so the order of the ranks decides the last
    bit.

    Shapes: own [shard], in place; others [N-1, shard], the other ranks' parts in rank order, undefined after
    it.
    """
    before, after = others[:rank], others[rank:]
    if rank > 0:
        partial_sum = before[0]
        for part in before[1:]:
            partial_sum += part
        own += partial_sum
    for part in after:
        own += part
