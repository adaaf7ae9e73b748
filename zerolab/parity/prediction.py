"""Predict by the paper's formulas what a rank holds and sends, for one model as it is cut into units."""

from dataclasses import dataclass, fields

from zerolab import cost
from zerolab.collectives import Comm, DirectComm
from zerolab.measure import MeasuredStates
from zerolab.memory import ModelStates, model_states
from zerolab.optimizer import ZeroOptimizer
from zerolab.stages.base import Stage
from zerolab.trace import Traffic
from zerolab.unit import FlatUnit


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
    payload travels with its padding, and (N-1)/N of it. Where ranks own whole parameters, each has its own
    share, and sends what is not its own to be reduced, and its own to all others. With hybrid sharding that
    holds for the N ranks of a group, and the gradients of what a rank owns are reduced over the copies.
    """
    comm, copies, traffic = optimizer.stage.comm, optimizer.stage.copies, Traffic()
    memory = [_states(unit, optimizer, stage, comm.world_size) for unit in optimizer.units]
    for run in optimizer.engine.units:
        for flat in run.flats:
            kind = (flat.dtype.itemsize, flat.grads.dtype.itemsize, flat.trainable, run.is_root)
            traffic.logical_bytes += int(cost.unit_bytes(flat.numel, stage, *kind))
            traffic.wire_bytes += int(_wire_bytes(flat, comm, stage, kind))
            if copies is not None and flat.trainable:
                traffic.logical_bytes += 2 * flat.owned_numel * flat.grads.dtype.itemsize
                traffic.wire_bytes += int(_bytes_between_copies(flat, optimizer.stage, copies))
    sums = (sum(getattr(part, each.name) for part in memory) for each in fields(ModelStates))
    return Prediction(ModelStates(*sums), traffic)


def _states(unit: FlatUnit, optimizer: ZeroOptimizer, stage: int, ranks: int) -> ModelStates:
    """Return the bytes of one unit on this rank, of as many that share a copy."""
    convention = unit.precision.convention
    if not unit.trainable:
        return model_states(0, ranks, stage, convention, frozen_psi=unit.numel)
    k = 0.0
    if optimizer.offload.tier is None:
        k = _state_bytes_per_element(unit, optimizer) + 4 * unit.precision.has_masters
    share = None if unit.cuts is None else unit.owned_numel / max(1, unit.numel)
    return model_states(unit.numel, ranks, stage, convention, k=k, own_share=share)


def _state_bytes_per_element(unit: FlatUnit, optimizer: ZeroOptimizer) -> float:
    """The mean over the unit's parameters; where ranks own them whole, over those of this rank."""
    spans = unit.spans
    if unit.cuts is not None:
        spans = [span for span in spans if unit.owned.start <= span.offset < unit.owned.stop]
    nbytes = sum(optimizer.updates.state_bytes(span.parameter) * span.numel for span in spans)
    return nbytes / max(1, sum(span.numel for span in spans))


def _wire_bytes(unit: FlatUnit, comm: Comm, stage: int, kind: tuple) -> float:
    """Return the bytes that this rank sends of a unit in one step."""
    even = cost.wire_bytes(cost.unit_bytes(unit.padded_numel, stage, *kind), comm.world_size, "all_gather")
    if unit.cuts is None or not isinstance(comm, DirectComm):
        return even
    own = comm.shard_range(unit.padded_numel, cuts=unit.cuts)
    parameter_bytes, gradient_bytes, _, kept = kind
    sizes = (unit.padded_numel, own.stop - own.start, comm.world_size)
    return cost.owner_bytes(*sizes, stage, parameter_bytes, gradient_bytes, kept)


def _bytes_between_copies(unit: FlatUnit, stage: Stage, copies: Comm) -> float:
    """Return the bytes that this rank sends to those that own the same part: an all-reduce of gradients."""
    owned, share = (each.stop - each.start for each in (unit.owned, stage.share(unit)))
    itemsize = unit.grads.dtype.itemsize
    if isinstance(copies, DirectComm):
        return cost.owner_bytes(owned, share, copies.world_size, 0, itemsize, itemsize)
    return cost.wire_bytes(owned * itemsize, copies.world_size, "all_reduce")
