"""OptimizerBase: the attributes that the parts of ZeroOptimizer share."""

from typing import Any

import torch
from torch import nn

from zerolab.collectives import Comm
from zerolab.engine import Engine
from zerolab.engine.agreement import CLEARED, WRITTEN, agree_on_order, agree_on_used
from zerolab.engine.states import TrainingRun
from zerolab.optimizer.local import LocalUpdate
from zerolab.optimizer.loss_scale import LossScale
from zerolab.optimizer.settings import describe_groups
from zerolab.optimizer.slices import Slice
from zerolab.optimizer.slots import Slots
from zerolab.stages.base import Stage
from zerolab.storages import MemoryMeter
from zerolab.trace import Trace
from zerolab.unit import FlatUnit
from zerolab.unit.span import Span


class OptimizerBase(torch.optim.Optimizer):
    """The attributes that ZeroOptimizer sets when it is built, and its parts read."""

    model: nn.Module
    comm: Comm
    stage: Stage
    units: list[FlatUnit]
    local: LocalUpdate
    loss_scale: LossScale | None
    training: TrainingRun
    engine: Engine
    trace: Trace
    meter: MemoryMeter
    _slots: Slots
    state: Any  # a SliceStates, where torch declares a defaultdict

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def world_size(self) -> int:
        return self.comm.world_size

    @property
    def slices(self) -> list[Slice]:
        """This rank's slice of each parameter, in the order of the parameter groups."""
        return self.local.slices

    def _note_state(self) -> None:
        self.meter.report("optimizer state", *self.local.state_tensors())

    @property
    def _gradient_scale(self) -> float:
        """How many times too large the gradients are, because the loss was scaled."""
        return 1.0 if self.loss_scale is None else self.loss_scale.applied

    def _finish_grads(self) -> set[Span]:
        """See that every gradient is reduced; the spans that any rank used."""
        self._slots.check()
        self.engine.finish_grads()
        reducer = self.engine.reducer
        if not reducer.order_is_agreed:
            reducer.set_order(agree_on_order(self.comm, reducer.flats, reducer.completed))
        by_hand = {
            "the hyperparameters": describe_groups(self.param_groups, self.local.members),
            WRITTEN: self.engine.written_values(),
            CLEARED: self.engine.reducer.cleared_since_last_call(),
        }
        return agree_on_used(self.comm, self.engine.trainable, by_hand)
