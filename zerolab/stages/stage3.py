"""Stage 3: the parameters are sharded too (P_os+g+p)."""

from collections.abc import Callable
from typing import final

from zerolab.collectives import Work
from zerolab.stages.base import Stage
from zerolab.unit import FlatUnit


@final
class Stage3(Stage):
    """As stage 2, and a parameter is whole only while its unit computes: gathered for forward and backward.

    Memory: 16Ψ/N bytes, and the units at work.
    Comm: 3Ψ a micro-batch, less the root unit, which stays whole from forward to backward.
    Source: ZeRO §5.3, §7.2.2 (arXiv:1910.02054)
    """

    def setup(self, unit: FlatUnit) -> None:
        unit.own(self.share(unit))
        unit.detach_shard()
        unit.free()

    def unshard(self, unit: FlatUnit) -> Work:
        unit.refill()
        return self.comm.all_gather(unit.flat, unit).then(unit.restore_parameters)

    def reshard(self, unit: FlatUnit) -> None:
        unit.free()

    def reduce_grads(self, unit: FlatUnit) -> Work:
        return self.comm.reduce_scatter(unit.grads.local, unit, unit.grads.op)

    def after_reduce(self, unit: FlatUnit) -> None:
        unit.grads.keep(unit.grads.local[unit.owned].clone())
        unit.grads.free_local()

    def update(self, units: list[FlatUnit], step: Callable[[FlatUnit], None]) -> None:
        for unit in units:
            step(unit)
