"""Gatherer: which units are whole, which are being gathered, and which scope will want its own next."""

from zerolab.collectives import Work
from zerolab.engine.scopes import Scope
from zerolab.measure import Gauge
from zerolab.stages.base import Stage
from zerolab.trace import Trace
from zerolab.unit import FlatUnit


class Gatherer:
    """Makes scopes whole in time and lets them go again, through the stage's unshard and reshard.

    The order in which a forward pass enters the scopes is learned as it goes; the next pass prefetches by it,
    and the backward pass by its reverse.

    Attributes: held: how many full_params() are open; while any is, nothing is let go.
    Memory: at most ``prefetch`` + 1 scopes are whole at a time, and the root.
    """

    def __init__(self, stage: Stage, gauge: Gauge, trace: Trace, prefetch: int):
        self.stage, self.gauge, self.trace, self.prefetch = stage, gauge, trace, prefetch
        self.held = 0
        self._order: list[Scope] = []
        self._cursor = 0
        self._under_way: dict[FlatUnit, Work] = {}

    def rewind(self) -> None:
        """A new forward pass begins."""
        self._cursor = 0

    def note_entry(self, scope: Scope) -> None:
        """A forward pass enters ``scope``: remember the order. A new path overwrites the rest of the old.

        To come by the first scope again unexpectedly is a new pass too: submodules may be called one by one.
        """
        if self._order[self._cursor : self._cursor + 1] != [scope] and self._order[:1] == [scope]:
            self.rewind()
        if self._order[self._cursor : self._cursor + 1] != [scope]:
            self._order[self._cursor :] = [scope]
        self._cursor += 1

    def start_next(self) -> None:
        """In forward: start on the scopes after the one just entered."""
        self._start(self._order[self._cursor : self._cursor + self.prefetch])

    def start_before(self, scope: Scope) -> None:
        """In backward: start on the scopes entered before ``scope``, nearest first, that it will come to."""
        last = max((index for index, each in enumerate(self._order) if each is scope), default=0)
        coming = [each for each in reversed(self._order[:last]) if each.expects_backward]
        self._start(coming[: self.prefetch])

    def unshard(self, scope: Scope) -> None:
        """Make the scope's units whole, waiting for their gathers."""
        self._start([scope])
        for unit in scope.units:
            if unit in self._under_way:
                self._under_way.pop(unit).wait()

    def reshard(self, units: list[FlatUnit]) -> None:
        """Let the units' parameters go, those that are whole, unless they are held for a user."""
        for unit in units:
            if unit.whole and not self.held:
                self.stage.reshard(unit)
                self.gauge.note(unit, self.trace.phase)

    def discard_unused(self) -> None:
        """Close what was gathered ahead for a scope that was then not entered."""
        while self._under_way:
            unit, work = self._under_way.popitem()
            work.wait()
            self.reshard([unit])

    def _start(self, scopes: list[Scope]) -> None:
        for unit in (unit for scope in scopes for unit in scope.units):
            if not unit.whole and unit not in self._under_way:
                self._under_way[unit] = self.stage.unshard(unit)
                self.gauge.note(unit, self.trace.phase)
