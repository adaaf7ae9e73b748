"""Stage 1: the optimizer's state is sharded (P_os)."""

from collections.abc import Callable
from typing import final

from zerolab.collectives import Work
from zerolab.stages.base import Stage
from zerolab.unit import FlatUnit


@final
class Stage1(Stage):
    """Every rank updates the 1/N of the parameters it owns, so it keeps 1/N of the optimizer's state.

    Memory: 4Ψ + 12Ψ/N bytes (mixed).
    Comm: 2Ψ, the all-reduce with the update between its halves; (M+1)Ψ if each of M micro-batches is reduced.
    Source: ZeRO §5.1, §7.2.1 (arXiv:1910.02054)
    """

    def setup(self, unit: FlatUnit) -> None:
        unit.own(self.share(unit))

    def unshard(self, unit: FlatUnit) -> Work:
        return Work()

    def reshard(self, unit: FlatUnit) -> None:
        """Parameters stay whole."""

    def reduce_grads(self, unit: FlatUnit) -> Work:
        return self.comm.reduce_scatter(unit.grads.local, unit, unit.grads.op)

    def after_reduce(self, unit: FlatUnit) -> None:
        unit.grads.keep(unit.grads.local[unit.owned])

    def update(self, units: list[FlatUnit], step: Callable[[FlatUnit], None]) -> None:
        for unit in units:
            step(unit)
            unit.expect(self.comm.all_gather(unit.flat, unit).wait)
