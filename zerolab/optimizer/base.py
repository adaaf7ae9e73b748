"""OptimizerBase: what the parts of ZeroOptimizer, which are in files of their own, know of each other."""

from typing import Any

import torch

from zerolab.collectives import Comm
from zerolab.engine import Engine
from zerolab.engine.states import TrainingRun
from zerolab.optimizer.local import LocalUpdate
from zerolab.optimizer.loss_scale import LossScale
from zerolab.optimizer.slices import Slice
from zerolab.stages.base import Stage
from zerolab.storages import MemoryMeter
from zerolab.trace import Trace
from zerolab.unit import FlatUnit


class OptimizerBase(torch.optim.Optimizer):
    """The attributes that ZeroOptimizer sets when it is built, and its parts read."""

    comm: Comm
    stage: Stage
    units: list[FlatUnit]
    local: LocalUpdate
    loss_scale: LossScale | None
    training: TrainingRun
    engine: Engine
    trace: Trace
    meter: MemoryMeter
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
