"""Predict by the paper's formulas what a rank holds and sends, for one model as it is cut into units."""

from dataclasses import dataclass, fields

from zerolab import cost
from zerolab.measure import MeasuredStates
from zerolab.memory import ModelStates, model_states
from zerolab.optimizer import ZeroOptimizer
from zerolab.precision import Precision
from zerolab.trace import Traffic


@dataclass(frozen=True)
class Prediction:
    """Memory by category and traffic of one step, from Ψ, N and the stage, before anything was measured."""

    memory: ModelStates
    traffic: Traffic

    def holds_memory(self, measured: MeasuredStates) -> bool:
        """Return whether each category is what was predicted, to the byte."""
        pairs = (
            (measured.params_bytes, self.memory.params_bytes),
            (measured.grads_bytes, self.memory.grads_bytes),
            (measured.optimizer_bytes, self.memory.optimizer_bytes),
        )
        return all(abs(ours - theirs) < 1 for ours, theirs in pairs)

    def holds_traffic(self, measured: Traffic) -> bool:
        """Return whether payload and wire bytes are what was predicted, to the byte."""
        return (
            abs(measured.logical_bytes - self.traffic.logical_bytes) < 1
            and abs(measured.wire_bytes - self.traffic.wire_bytes) < 1
        )


def predict(optimizer: ZeroOptimizer, stage: int) -> Prediction:
    """Predict one step of training in which every trainable parameter is used and every unit entered once.

    Traffic is summed unit by unit: frozen ones are gathered only, the root is gathered once. On the wire a
    payload travels with its padding, and (N-1)/N of it.
    """
    precisions = dict.fromkeys(unit.precision for unit in optimizer.units)
    parts = [_states(optimizer, stage, precision) for precision in precisions]
    memory = ModelStates(*(sum(getattr(part, each.name) for part in parts) for each in fields(ModelStates)))
    traffic = Traffic()
    for run in optimizer.engine.units:
        for flat in run.flats:
            kind = (flat.dtype.itemsize, flat.grads.dtype.itemsize, flat.trainable, run.is_root)
            payload = cost.unit_bytes(flat.numel, stage, *kind)
            padded = cost.unit_bytes(flat.padded_numel, stage, *kind)
            traffic.logical_bytes += int(payload)
            traffic.wire_bytes += int(cost.wire_bytes(padded, optimizer.world_size, "all_gather"))
    return Prediction(memory, traffic)


def _states(optimizer: ZeroOptimizer, stage: int, precision: Precision) -> ModelStates:
    """Return the bytes of all units of one precision."""
    units = [unit for unit in optimizer.units if unit.precision is precision]
    trainable = sum(unit.numel for unit in units if unit.trainable)
    frozen = sum(unit.numel for unit in units if not unit.trainable)
    states = [s.state_bytes_per_element for s in optimizer.slices if s.unit in units and s.unit.trainable]
    k = max(states, default=0) + 4 * precision.has_masters if optimizer.offload.tier is None else 0
    return model_states(trainable, optimizer.world_size, stage, precision.convention, k=k, frozen_psi=frozen)
