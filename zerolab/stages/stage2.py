"""Stage 2: the gradients are sharded too (P_os+g)."""

from collections.abc import Callable
from typing import final

from zerolab.collectives import Work
from zerolab.stages.base import Stage
from zerolab.unit import FlatUnit


@final
class Stage2(Stage):
    """As stage 1, and a gradient lives only until it is reduced: a rank keeps the 1/N its update needs.

    Memory: 2Ψ + 14Ψ/N bytes (mixed).
    Comm: 2Ψ; (M+1)Ψ if each of M micro-batches is reduced.
    Source: ZeRO §5.2, §7.2.1 (arXiv:1910.02054)
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
        unit.grads.keep(unit.grads.local[unit.owned].clone())
        unit.grads.free_local()

    def update(self, units: list[FlatUnit], step: Callable[[FlatUnit], None]) -> None:
        for unit in units:
            step(unit)
            unit.expect(self.comm.all_gather(unit.flat, unit).wait)
