"""Hybrid sharding: stage 3 within groups of ranks, such as nodes, and a copy of the model in each group."""

from collections.abc import Callable
from typing import final

from zerolab.collectives import Comm, Work
from zerolab.stages.base import Stage
from zerolab.unit import FlatUnit
from zerolab.unit.owned_part import OwnedPart


@final
class HybridStage3(Stage):
    """As stage 3 among the S ranks of a group. Each of the N/S groups has all of the model, and the gradients
    of the part that a rank owns are then reduced over the ranks of all groups that own the same part.

    Memory: 16Ψ/S bytes, and the units at work.
    Comm: 3Ψ a micro-batch among S ranks, as stage 3, and 2Ψ/S between the groups.
    Source: hybrid sharding, Zhao et al. §3.2.2 (arXiv:2304.11277); MiCS (arXiv:2205.00119)
    """

    def __init__(self, comm: Comm, copies: Comm):
        """Args: comm: the ranks of this group. copies: those that own the same part in all groups."""
        super().__init__(comm)
        self.copies: Comm = copies

    def setup(self, unit: FlatUnit) -> None:
        unit.own(self.comm.shard_range(unit.padded_numel, cuts=unit.cuts))
        unit.detach_shard()
        unit.free()

    def unshard(self, unit: FlatUnit) -> Work:
        unit.refill()
        return self.comm.all_gather(unit.flat, unit).then(unit.restore_parameters)

    def reshard(self, unit: FlatUnit) -> None:
        unit.free()

    def reduce_grads(self, unit: FlatUnit) -> Work:
        within = self.comm.reduce_scatter(unit.grads.local, unit, unit.grads.op)
        return within.then(lambda: self._reduce_over_copies(unit))

    def _reduce_over_copies(self, unit: FlatUnit) -> Work:
        part = OwnedPart(unit, self.copies.world_size)
        return self.copies.all_reduce(unit.grads.narrow_local(), part, unit.grads.op)

    def after_reduce(self, unit: FlatUnit) -> None:
        unit.grads.keep(unit.grads.local)
        unit.grads.free_local()

    def share(self, unit: FlatUnit) -> slice:
        """A part of what this rank owns: the ranks that own the same divide it among themselves."""
        first, last = OwnedPart(unit, self.copies.world_size).bounds(self.copies.rank)
        return slice(unit.owned.start + first, unit.owned.start + last)

    def update(self, units: list[FlatUnit], step: Callable[[FlatUnit], None]) -> None:
        for unit in units:
            step(unit)
