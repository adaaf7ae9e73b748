"""Compute what a training step sends: elements, bytes, and seconds by the α–β model.

Every ZeRO stage is built from two collectives, reduce-scatter and all-gather; an all-reduce is one after the
other. So a step is described by how often each of the two passes over the whole model (`passes_per_step`).
Volume, bytes and seconds are computed from that.
"""

from typing import NamedTuple

from zerolab.checks import number as _number
from zerolab.checks import whole as _whole

COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce", "all_to_all", "broadcast")


class Passes(NamedTuple):
    """How often each collective passes over all Ψ parameters in one optimizer step."""

    reduce_scatter: int
    all_gather: int


def passes_per_step(stage: int, micro_batches: int = 1, reduce_each: bool | None = None) -> Passes:
    """Return the collectives of one optimizer step that accumulates gradients over `micro_batches`.

    Stages 0 and 1 hold whole gradients anyway. Under `no_sync()` they add micro-batches up locally, which
    costs no memory, and reduce once; that is counted here. Stages 2 and 3 keep a shard of the gradient, so
    they reduce every micro-batch. `reduce_each=True` counts a loop without `no_sync()`, where all stages do;
    `reduce_each=False` counts `no_sync()` at stages 2 and 3, which then hold whole gradients too.
    Stage 3 gathers the parameters twice for every micro-batch, once for forward and once for backward.

    Raises: TypeError or ValueError for an unknown stage, or fewer than one micro-batch.
    Source: ZeRO §7 (arXiv:1910.02054) for one micro-batch.
    """
    stage, micro_batches = _whole("stage", stage, 0, 3), _whole("micro_batches", micro_batches)
    if reduce_each is None:
        reduce_each = stage >= 2
    reduces = micro_batches if reduce_each else 1
    if stage == 0:
        return Passes(reduce_scatter=reduces, all_gather=reduces)  # the two halves of an all-reduce
    if stage == 3:
        return Passes(reduce_scatter=reduces, all_gather=2 * micro_batches)
    return Passes(reduce_scatter=reduces, all_gather=1)  # the updated parameters, once


def communication_volume(
    psi: float, stage: int, micro_batches: int = 1, reduce_each: bool | None = None
) -> float:
    """Elements that each rank sends in one optimizer step, by the paper's convention, which drops (N-1)/N.

    Comm: 2Ψ, 2Ψ, 2Ψ, 3Ψ for stages 0 to 3. With M micro-batches 2Ψ, 2Ψ, (M+1)Ψ, 3MΨ, so that under
        accumulation stage 2 costs more than stage 1; where stages 0 and 1 run without `no_sync()`, 2MΨ and
        (M+1)Ψ. `reduce_each` is explained at `passes_per_step`.
    Raises: TypeError or ValueError for a psi that is no finite number >= 0, and as `passes_per_step`.
    Source: ZeRO §7.2 (arXiv:1910.02054).
    """
    return _number("psi", psi) * sum(passes_per_step(stage, micro_batches, reduce_each))


def unit_bytes(
    numel: float,
    stage: int,
    parameter_bytes: float = 4,
    gradient_bytes: float = 4,
    trainable: bool = True,
    kept: bool = False,
    micro_batches: int = 1,
) -> float:
    """Payload bytes that one unit of `numel` parameters moves in a step, by the paper's convention.

    A whole model moves a little less than `communication_volume` says: frozen parameters have no gradients to
    reduce and no update to share, and a unit that is `kept` whole from forward to backward (the root, at
    stage 3) is gathered once and not twice. Gradients and parameters may differ in bytes per element.

    Comm: 2Ψ, 2Ψ, 2Ψ, 3Ψ for a trainable unit, 2Ψ if kept at stage 3; frozen 0, 0, 0, 2Ψ, or Ψ if kept. As
        often with micro-batches as in `passes_per_step`.
    Raises: TypeError or ValueError for sizes that are no finite numbers >= 0, or as `passes_per_step`.
    """
    reduce_scatter, all_gather = passes_per_step(stage, micro_batches)
    if not trainable:
        reduce_scatter, all_gather = 0, all_gather if stage == 3 else 0
    if kept and stage == 3:
        all_gather -= micro_batches
    parameter_bytes = _number("parameter_bytes", parameter_bytes)
    gradient_bytes = _number("gradient_bytes", gradient_bytes)
    gathered_bytes = gradient_bytes if stage == 0 else parameter_bytes  # stage 0 gathers the gradients' sum
    return _number("numel", numel) * (reduce_scatter * gradient_bytes + all_gather * gathered_bytes)


def owner_bytes(
    numel: float,
    own_numel: float,
    world_size: int,
    stage: int,
    parameter_bytes: float = 4,
    gradient_bytes: float = 4,
    kept: bool = False,
) -> float:
    """Bytes that a rank sends of one unit in a step, where it owns `own_numel` of its parameters.

    It sends each owner the gradients of what that one owns, and its own parameters to all others. Where
    ranks own whole parameters, as for Muon, their shares differ, and so do these bytes. Their mean over the
    ranks is that of equal shards.

    Comm: Ψ - Ψ_own for a reduction, (N-1)Ψ_own for a gather, as often as in `passes_per_step`.
    Raises: TypeError or ValueError for sizes that are no finite numbers >= 0, or an unknown stage.
    """
    reduce_scatter, all_gather = passes_per_step(stage)
    if kept and stage == 3:
        all_gather -= 1
    numel, own_numel = _number("numel", numel), _number("own_numel", own_numel)
    gathered_bytes = gradient_bytes if stage == 0 else parameter_bytes
    reduced = (numel - own_numel) * _number("gradient_bytes", gradient_bytes)
    gathered = own_numel * (_whole("world_size", world_size) - 1) * _number("bytes", gathered_bytes)
    return reduce_scatter * reduced + all_gather * gathered


def wire_bytes(payload_bytes: float, world_size: int, collective: str) -> float:
    """Bytes that a rank really sends, and as many that it receives, when the collective runs on a ring.

    `payload_bytes` is the whole tensor: what goes into a reduce-scatter, what comes out of an all-gather.

    Comm: S(N-1)/N for reduce_scatter, all_gather and all_to_all; twice that for all_reduce; for broadcast,
        down a chain, S by every rank but the last. Nothing at N=1.
    Raises: TypeError or ValueError for sizes not finite or below 0, world sizes below 1, unknown collectives.
    """
    payload_bytes, world_size = _number("payload_bytes", payload_bytes), _whole("world_size", world_size)
    _check_collective(collective)
    if collective == "broadcast":
        return payload_bytes if world_size > 1 else 0
    rounds = 2 if collective == "all_reduce" else 1
    return rounds * payload_bytes * (world_size - 1) / world_size


def collective_seconds(
    payload_bytes: float,
    world_size: int,
    collective: str,
    latency_seconds: float,
    bandwidth_bytes_per_second: float,
) -> float:
    """Seconds by the α–β model: α (latency) for each message in a row, β (1/bandwidth) for each byte.

    A ring sends N-1 messages in a row, an all-reduce 2(N-1). Small payloads pay for α and large ones for β,
    which is why gradients are sent in buckets. A lower bound: no contention, no cost of the additions.

    Raises: as `wire_bytes`; ValueError for a bandwidth of 0 too.
    """
    bandwidth = _number("bandwidth_bytes_per_second", bandwidth_bytes_per_second)
    if bandwidth == 0:
        raise ValueError("bandwidth_bytes_per_second is 0; it must be above 0, for example 25e9 for 25 GB/s")
    sent_bytes = wire_bytes(payload_bytes, world_size, collective)
    messages = (world_size - 1) * (2 if collective == "all_reduce" else 1)
    return messages * _number("latency_seconds", latency_seconds) + sent_bytes / bandwidth


def communication_seconds(
    psi: float,
    stage: int,
    world_size: int,
    latency_seconds: float,
    bandwidth_bytes_per_second: float,
    bytes_per_element: float = 2,
    micro_batches: int = 1,
    units: int = 1,
    gradient_bytes: float | None = None,
) -> float:
    """Seconds of communication in one optimizer step, none of it hidden behind computation.

    `units` is the number of equal pieces that the model travels in: as many bytes, `units` times the latency.
    `gradient_bytes` is the width of a gradient's element where it is not that of a parameter's.
    """
    parameter_bytes = _number("bytes_per_element", bytes_per_element)
    gradient_bytes = parameter_bytes if gradient_bytes is None else gradient_bytes
    unit = _number("psi", psi) / _whole("units", units)
    payload_bytes = unit_bytes(unit, stage, parameter_bytes, gradient_bytes, micro_batches=micro_batches)
    link = (latency_seconds, bandwidth_bytes_per_second)
    # A reduce-scatter and an all-gather take the same time on a ring, so all bytes can be sent in one.
    calls = sum(passes_per_step(stage, micro_batches))
    return units * calls * collective_seconds(payload_bytes / calls, world_size, "all_gather", *link)


def tensor_parallel_volume(
    layers: int,
    hidden: int,
    batch: int,
    seq: int,
    recomputed_all_reduces: int = 0,
    partition_activations: bool = False,
) -> int:
    """Elements that tensor-parallel ranks send in one forward and backward pass, by the paper's convention.

    A transformer block has two pairs of linear layers. Each pair adds up its output in forward and its
    input's gradient in backward, each of batch x seq x hidden elements, which an all-reduce counts twice.
    Under checkpointing a block's forward is computed again. `recomputed_all_reduces` of its two are then
    repeated: both in the paper, one by torch's default, which stops as soon as backward has what it needs,
    before the last one. Where checkpoints are partitioned, one all-gather joins a block's input again.

    Comm: 8·b·s·h a block; 12 with both repeated, 10 with one; 1 more with partitioned checkpoints.
    Raises: TypeError or ValueError for sizes below 1, and for other than 0, 1 or 2 repeated all-reduces.
    Source: ZeRO §8 (arXiv:1910.02054), which counts 12 and 1; Megatron-LM §3 (arXiv:1909.08053).
    """
    repeated = _whole("recomputed_all_reduces", recomputed_all_reduces, 0, 2)
    message_numel = _whole("batch", batch) * _whole("seq", seq) * _whole("hidden", hidden)
    return _whole("layers", layers) * (8 + 2 * repeated + bool(partition_activations)) * message_numel


def _check_collective(collective: str) -> None:
    if collective not in COLLECTIVES:
        raise ValueError(f"collective is {collective!r}; it must be one of {', '.join(COLLECTIVES)}")
