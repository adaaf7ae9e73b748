"""OptimizerBase: the attributes that the parts of ZeroOptimizer share."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import nn

from zerolab.collectives import Comm
from zerolab.engine import Engine
from zerolab.engine.agreement import (
    COPIES,
    LOADED,
    TENSOR_PARALLEL,
    WRITTEN,
    agree_on,
    agree_on_order,
    agree_on_used,
)
from zerolab.engine.states import TrainingRun
from zerolab.optimizer.axes import Axes
from zerolab.optimizer.loads import Loads
from zerolab.optimizer.local import LocalUpdate
from zerolab.optimizer.loss_scale import LossScale
from zerolab.optimizer.offload import Offload
from zerolab.optimizer.settings import describe_groups
from zerolab.optimizer.slices import Slice
from zerolab.optimizer.slots import Slots
from zerolab.optimizer.updates import Updates
from zerolab.stages.base import Stage
from zerolab.storages import MemoryMeter, checksum
from zerolab.trace import Trace
from zerolab.unit import FlatUnit
from zerolab.unit.span import Span

_WORDS = {2: torch.int16, 4: torch.int32}


class OptimizerBase(torch.optim.Optimizer):
    """The attributes that ZeroOptimizer sets when it is built, and its parts read."""

    model: nn.Module
    comm: Comm
    axes: Axes
    stage: Stage
    units: list[FlatUnit]
    offload: Offload
    local: LocalUpdate
    updates: Updates
    loss_scale: LossScale | None
    training: TrainingRun
    engine: Engine
    trace: Trace
    meter: MemoryMeter
    _slots: Slots
    _loads: Loads
    _seen_gradients: set[Span]  # of parameters whose gradients tensor-parallel ranks have compared

    @property  # torch assigns a defaultdict when it builds an optimizer
    def state(self) -> Any:
        """The state of this rank's slices, by their tensors: a SliceStates or StatesAway."""
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        if "engine" in self.__dict__:  # it is complete
            raise RuntimeError(
                "assigning optimizer.state is refused, because it only shows the state of the stock "
                "optimizers: empty it with optimizer.state.clear(), or replace it with "
                "optimizer.load_state_dict(...) or zerolab.load(...)"
            )
        self._state = state

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

    def _next_step(self) -> None:
        """Open the next step in the traces."""
        self.trace.next_step()
        if self.axes.parallel is not None:
            self.axes.parallel.trace.next_step()

    def _note_state(self) -> None:
        self.meter.report("optimizer state", *self.local.state_tensors())

    @property
    def _gradient_scale(self) -> float:
        """How many times too large the gradients are, because the loss was scaled."""
        return 1.0 if self.loss_scale is None else self.loss_scale.applied

    def _finish_grads(self) -> set[Span]:
        """See that every gradient is reduced; the spans that any rank used."""
        self.training.require_whole_updates()
        self._slots.check(self.local.in_groups)
        self.local.require_members(self.param_groups)
        self.engine.finish_grads()
        reducer = self.engine.reducer
        if not reducer.order_is_agreed:
            reducer.set_order(agree_on_order(self.comm, reducer.flats, reducer.completed))
        hyperparameters = describe_groups(self.param_groups, self.local.members)
        loads = self._loads.compare()
        by_hand = {
            "the hyperparameters": hyperparameters,
            LOADED: loads,
            WRITTEN: self.engine.written_values(),
        }
        used = agree_on_used(self.comm, self.engine.trainable, by_hand, reducer.cleared)
        if self.axes.parallel is not None:
            lines = [
                *hyperparameters,
                *(f"load_state_dict, call {number}" for number in range(len(loads))),
                *sorted(f"{span.name} was used" for span in used),
                self._uncut_in_turn(),
                *self._first_gradients(used),
            ]
            agree_on(self.axes.parallel.comm, TENSOR_PARALLEL, lines)
            self._seen_gradients |= used
        if self.stage.copies is not None and self.comm.device.type == "cpu":
            agree_on(self.stage.copies, COPIES, [self._owned_in_turn()])
        self._loads = Loads()  # only now: where ranks differ, they do so until something makes them alike
        self.engine.forget_writes()
        reducer.forget_clearings()
        return used

    def _owned_in_turn(self) -> str:
        """The checksum of what this rank owns of one unit, of another in each step. A GPU's is not read."""
        unit = self.units[self.trace.step_number % len(self.units)]
        return f"unit {unit.name} with the checksum {checksum(unit.shard).hex()}"

    @cached_property
    def _uncut(self) -> list[tuple[FlatUnit, Span]]:
        """The parameters that all tensor-parallel ranks have whole."""
        every = ((unit, span) for unit in self.engine.trainable for span in unit.spans)
        return [(unit, span) for unit, span in every if span.parameter not in self.axes.splits]

    def _uncut_in_turn(self) -> str:
        """The sum of the bits of one parameter that is not cut, another in each step.

        Tensor-parallel ranks have the same, unless they compute different things, as with other dropout masks
        or other data. Reading a GPU's values would wait for it, so none are read there.
        """
        if not self._uncut or self.comm.device.type != "cpu":
            return ""
        unit, span = self._uncut[self.trace.step_number % len(self._uncut)]
        # An offloaded master is not read for this: what it is rounded to shows a difference some steps later.
        values = unit.shard if self.offload.has_master_of(unit) else unit.values()
        return f"{span.name} with the bits {_bits(unit, span, values)}"

    def _first_gradients(self, used: set[Span]) -> Iterator[str]:
        """The sums of the bits of gradients that come for the first time, of parameters that are not cut.

        They differ where a parameter stands between the two layers of a pair, as a norm over each head does:
        each rank then has a part of its gradient. On a GPU none are read, as reading would wait for it.
        """
        if self.comm.device.type != "cpu":
            return
        for unit, span in self._uncut:
            if span in used and span not in self._seen_gradients and unit.grads.reduced is not None:
                yield f"the gradient of {span.name} with the bits {_bits(unit, span, unit.grads.reduced)}"


def _bits(unit: FlatUnit, span: Span, owned: torch.Tensor) -> int:
    """The sum of the bits of this rank's part of a parameter. ``owned``: what it owns of the unit."""
    words = owned[span.within(unit.owned.start, unit.owned.stop)].view(_WORDS[owned.element_size()])
    return int(words.sum(dtype=torch.int64))
