"""Stage 0: plain data parallelism, the redundancy ZeRO starts from."""

from collections.abc import Callable
from typing import final

from zerolab.collectives import Work
from zerolab.stages.base import Stage
from zerolab.unit import FlatUnit


@final
class Stage0(Stage):
    """Every rank keeps everything, and every rank makes the same update.

    Memory: 16Ψ bytes.
    Comm: 2Ψ, the all-reduce of the gradients; 2MΨ if each of M micro-batches is reduced.
    Source: ZeRO §3.1, §7.1 (arXiv:1910.02054)
    """

    def setup(self, unit: FlatUnit) -> None:
        unit.own(slice(0, unit.padded_numel))

    def unshard(self, unit: FlatUnit) -> Work:
        return Work()

    def reshard(self, unit: FlatUnit) -> None:
        """Parameters stay whole."""

    def reduce_grads(self, unit: FlatUnit) -> Work:
        return self.comm.all_reduce(unit.grads.local, unit, unit.grads.op)

    def after_reduce(self, unit: FlatUnit) -> None:
        unit.grads.keep(unit.grads.local[unit.owned])

    def update(self, units: list[FlatUnit], step: Callable[[FlatUnit], None]) -> None:
        for unit in units:
            step(unit)
