"""Reducer: when a unit's gradients have all come, and in which order they are reduced."""

from collections import deque

import torch

from zerolab.collectives import Work
from zerolab.measure import Gauge
from zerolab.stages.base import Stage
from zerolab.storages import storage_bytes
from zerolab.trace import Trace
from zerolab.unit import FlatUnit
from zerolab.unit.sharded import as_plain_tensors
from zerolab.unit.span import Span


class Reducer:
    """Collects gradients unit by unit, and reduces the units in one fixed order on every rank.

    Gradients may come in another order on another rank, where a parameter was not used; collectives must not.
    A unit's turn comes when it and all before it are complete, and what is missing at the end of backward
    counts as zero.

    Memory: gradients take at most 2 (1 + ``in_flight``) units beyond what the stage keeps.
    """

    def __init__(self, units: list[FlatUnit], stage: Stage, gauge: Gauge, trace: Trace, in_flight: int):
        self.units, self.stage, self.gauge, self.trace, self.in_flight = units, stage, gauge, trace, in_flight
        self.order = units
        self.order_is_agreed = False
        self.completed: list[FlatUnit] = []
        self.syncing = True
        self.unreduced = True
        self.missing: dict[FlatUnit, set[Span]] = {}
        self._waiting: deque[FlatUnit] = deque()
        self._under_way: deque[tuple[FlatUnit, Work]] = deque()

    def adopt(self, first: list[FlatUnit]) -> None:
        """Reduce in this order from now on, the same on every rank; units it leaves out follow."""
        self.order = first + [unit for unit in self.order if unit not in first]
        self.order_is_agreed = True

    def expect(self) -> None:
        """A backward pass begins: note which gradients it owes."""
        self.completed = []
        for unit in self.units:
            unit.grads.notice_cleared()
            with as_plain_tensors():
                self.missing[unit] = {span for span in unit.spans if span.parameter.requires_grad}
        self._waiting = deque(self.order)

    def make_room(self, unit: FlatUnit, span: Span) -> None:
        """A gradient is about to be stored.

        Raises: RuntimeError where it is the second in one backward pass, because the first may be on its way
        already.
        """
        if span not in self.missing[unit]:
            raise RuntimeError(
                f"{span.name} receives a second gradient in one backward pass, after its unit may have been "
                "reduced: make a backward pass for each, under optimizer.no_sync() where they belong to one"
            )
        unit.grads.make_room(span)

    def collect(self, unit: FlatUnit, span: Span) -> bool:
        """Take one parameter's gradient; whether it was the last of its unit."""
        opens = not unit.grads.filled
        unit.grads.collect(span)
        if opens:  # the unit's buffer came with its first gradient
            self.gauge.note(unit, self.trace.phase)
        return self._strike(unit, {span})

    def give_up(self, unit: FlatUnit) -> bool:
        """Wait no longer for gradients that this backward pass has none for; whether that was all."""
        absent = {span for span in self.missing[unit] if not _will_come(span)}
        return bool(absent) and self._strike(unit, absent)

    def _strike(self, unit: FlatUnit, spans: set[Span]) -> bool:
        """Take what came, or will not, from what is missing; whether nothing is now."""
        self.missing[unit] -= spans
        if not self.missing[unit]:
            self.completed.append(unit)
        return not self.missing[unit]

    def reduce_complete(self) -> None:
        """Issue the reductions whose turn it is."""
        while self.syncing and self._waiting and not self.missing[self._waiting[0]]:
            self._reduce(self._waiting.popleft())

    def finish(self) -> None:
        """The end of a backward pass: reduce the rest, unless under no_sync, and wait for all of it."""
        if self.syncing:
            self._reduce_all(self._waiting)
        else:
            self.unreduced = True
        self.settle()

    def finish_unreduced(self) -> None:
        """Reduce what no backward pass did.

        That is so after no_sync alone, and on a rank whose loss never touched the model: the others reduced,
        so must it.
        """
        for unit in self.units:
            unit.grads.notice_cleared()
        if self.unreduced:
            self._reduce_all(deque(self.order))
            self.settle()

    def settle(self) -> None:
        """Wait for the reductions under way."""
        while self._under_way:
            self._keep_oldest()

    def clear(self, set_to_none: bool) -> None:
        """Forget every gradient, or set it to zero, once none is under way."""
        self.settle()
        for unit in self.units:
            unit.grads.clear() if set_to_none else unit.grads.zero()
            self.gauge.note(unit, self.trace.phase)
        self.unreduced = True

    def _reduce_all(self, waiting: deque[FlatUnit]) -> None:
        while waiting:
            self._reduce(waiting.popleft())
        self.unreduced = False

    def _reduce(self, unit: FlatUnit) -> None:
        unit.grads.fill_gaps()
        self._under_way.append((unit, self.stage.reduce_grads(unit)))
        self._note(unit)
        while len(self._under_way) > self.in_flight:
            self._keep_oldest()

    def _keep_oldest(self) -> None:
        unit, work = self._under_way.popleft()
        work.wait()
        self.stage.after_reduce(unit)
        moved_bytes = unit.grads.crest_bytes - storage_bytes((unit.grads.local, unit.grads.reduced))
        self._note(unit, moved_bytes)

    def _note(self, unit: FlatUnit, passing_bytes: int = 0) -> None:
        self.gauge.scratch_bytes = sum(work.scratch_bytes for _, work in self._under_way)
        self.gauge.note(unit, self.trace.phase, passing_bytes)


def _will_come(span: Span) -> bool:
    """Whether the backward pass that is running will still bring this parameter a gradient."""
    with as_plain_tensors():
        accumulation = torch.autograd.graph.get_gradient_edge(span.parameter).node
    try:
        return torch._C._will_engine_execute_node(accumulation)
    except RuntimeError:  # torch.autograd.grad was asked for just this one, and hands it over at its end
        return True
