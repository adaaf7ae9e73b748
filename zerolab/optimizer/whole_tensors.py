"""Return whole parameters and gradients, memory by category, and states as text."""

from contextlib import AbstractContextManager
from functools import partial

import torch

from zerolab.engine.agreement import agree_on_values
from zerolab.measure import MeasuredStates, census
from zerolab.optimizer.base import OptimizerBase
from zerolab.optimizer.gradients import whole_grads
from zerolab.unit import FlatUnit


class WholeTensors(OptimizerBase):
    """The part of ZeroOptimizer that gives users whole tensors, and tells them what it holds."""

    def full_params(self, from_rank: int | None = None) -> AbstractContextManager[None]:
        """Parameters whole and usable on every rank inside the with block; what is written to them is kept.

        Every rank has to write the same values; a checksum compares them when the block ends. With
        ``from_rank=0`` rank 0 alone may write, and every rank gets its values.

        Collective: every rank enters and leaves. Memory: 4Ψ.
        Comm: Ψ at stage 3, none before; 8 bytes a unit on leaving, or another Ψ with ``from_rank``.
        Raises: RuntimeError on leaving where ranks differ; ValueError for a rank that is not there.
        """
        if from_rank is not None and from_rank not in range(self.world_size):
            raise ValueError(
                f"from_rank is {from_rank!r}: pass a rank from 0 to {self.world_size - 1}, or leave it out"
            )
        return self.engine.full_params(partial(self._agree_on_values, from_rank))

    def _agree_on_values(self, from_rank: int | None, written: dict[FlatUnit, bytes]) -> None:
        if from_rank is None:
            agree_on_values(self.comm, written)
            return
        for unit in written:
            self.comm.broadcast(unit.flat, unit, from_rank)
        self.engine.forget_writes()

    def full_grads(self) -> dict[str, torch.Tensor]:
        """Return the averaged gradients, whole, by parameter name; parameters that nobody used are left out.

        Collective: every rank calls it. Memory: 4Ψ for the copies. Comm: Ψ.
        """
        used = self._finish_grads()
        return whole_grads(self.stage, self.engine.trainable, used, self._gradient_scale)

    def memory(self) -> MeasuredStates:
        """What this rank holds now, from storages, by category. Call it between backward and zero_grad.

        What is offloaded is in ``offloaded_bytes`` and in no other.
        """
        self.engine.finish_gathers()
        state, excess_bytes = self.local.state_tensors(), self.local.excess_bytes()
        away_bytes = self.offload.away_bytes
        return census(self.model, self.units, state, excess_bytes, self.meter.peak_bytes, away_bytes)

    def state_of(self, unit: FlatUnit) -> str:
        """What a unit of ``optimizer.units`` is doing now, in words: its parameters and its gradients."""
        return self.engine.state_of(unit)
