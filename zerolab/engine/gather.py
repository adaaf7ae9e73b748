"""Gatherer: track which units are whole or being gathered, and which is needed next."""

from collections.abc import Callable
from itertools import islice

from zerolab.collectives import Work
from zerolab.engine.states import UnitRun
from zerolab.stages.base import Stage
from zerolab.unit import FlatUnit
from zerolab.unit.states import ParamState


class Gatherer:
    """Makes units whole in time and shards them again, through the stage's unshard and reshard.

    The order in which a forward pass enters the units is recorded during the pass; the next pass prefetches
    in this order, and the backward pass in its reverse.

    Attributes:
        full_params_open: how many full_params() are open; while any is, nothing is sharded.
        graph_kept: whether a backward pass with create_graph=True was made, whose graph needs the parameters
            until the next backward pass or step has ended.
    Memory: at most ``prefetch`` + 1 units are whole at a time, and the root; all while a graph is kept.
    """

    def __init__(self, stage: Stage, prefetch: int):
        self.stage, self.prefetch = stage, prefetch
        self.full_params_open = 0
        self.graph_kept = False
        self._order: list[UnitRun] = []
        self._last_place: dict[UnitRun, int] = {}
        self._position = 0
        self._under_way: dict[FlatUnit, Work] = {}

    def rewind(self) -> None:
        """A new forward pass begins."""
        self._position = 0

    def note_entry(self, run: UnitRun) -> None:
        """A forward pass enters a unit: remember the order. A new path overwrites the rest of the old one.

        If the first unit comes again unexpectedly, that is a new pass too: submodules may be called one by
        one.
        """
        if self._order[self._position : self._position + 1] != [run] and self._order[:1] == [run]:
            self.rewind()
        if self._order[self._position : self._position + 1] != [run]:
            self._order[self._position :] = [run]
            self._last_place = {each: place for place, each in enumerate(self._order)}
        self._position += 1

    def prefetch_forward(self) -> None:
        """Start on the units after the one just entered."""
        for run in self._order[self._position : self._position + self.prefetch]:
            self._start(run.flats)

    def prefetch_backward(self, run: UnitRun, is_done: Callable[[FlatUnit], bool]) -> None:
        """Start on the units that were entered before this one and expect a backward pass, nearest first.

        Args: is_done: whether backward has no more need of a buffer, as of a root that only has the head.
        """
        entered_before = reversed(self._order[: self._last_place.get(run, 0)])
        expected = (each for each in entered_before if each.expects_backward)
        needed = ([flat for flat in each.flats if not is_done(flat)] for each in expected)
        for flats in islice(filter(None, needed), self.prefetch):
            self._start(flats)

    def unshard(self, run: UnitRun) -> None:
        """Make the unit whole, waiting for its gathers."""
        self._start(run.flats)
        for flat in run.flats:
            if flat in self._under_way:
                self._under_way.pop(flat).wait()

    def reshard(self, flats: list[FlatUnit]) -> None:
        """Reshard whole parameters, unless something still needs them."""
        for flat in flats:
            if flat.whole and not self.full_params_open and not self.graph_kept:
                self.stage.reshard(flat)

    def discard_unused(self) -> None:
        """Reshard what was prefetched for a unit that was then not entered."""
        while self._under_way:
            flat, work = self._under_way.popitem()
            work.wait()
            self.reshard([flat])

    def _start(self, flats: list[FlatUnit]) -> None:
        for flat in flats:
            if flat.state is ParamState.SHARDED:
                self._under_way[flat] = self.stage.unshard(flat)
