"""Compute what ZeRO-R, tensor parallelism and offload leave on a device, and what they move.

`zerolab.memory` counts the model states of data-parallel ranks. Here is the rest: the checkpoints of
activations, partitioned over tensor-parallel ranks or moved out of the device; the share of a model that a
tensor-parallel rank has; and an optimizer state that is kept in the host's memory or on disk.

In prose N_d is the number of data-parallel ranks and N_m that of tensor-parallel ranks, and b, s, h, L, w are
batch, sequence length, width, number of blocks and bytes per element.
"""

from dataclasses import dataclass, replace

from zerolab.checks import number, whole
from zerolab.memory import ModelStates


@dataclass(frozen=True)
class Placement:
    """Where bytes are held that need not be on the device all the time.

    Attributes:
        device_bytes: what stays on the device.
        outside_bytes: what is held in the host's memory or on disk. It is moved there once and back once.
    """

    device_bytes: float
    outside_bytes: float


def activation_checkpoints(
    layers: int,
    hidden: int,
    batch: int,
    seq: int,
    tensor_parallel: int = 1,
    partition: bool = False,
    offload: bool = False,
    bytes_per_element: int = 2,
) -> Placement:
    """The inputs of all blocks, which checkpointing keeps from forward to backward, on one rank.

    Tensor-parallel ranks have the same input of a block. With `partition`, the paper's P_a, each keeps its
    part alone; with `offload` too, P_a+cpu, the part is kept outside the device. Where N_m does not divide
    b·s·h, parts are rounded up.

    Memory: L·b·s·h·w; L·b·s·h·w / N_m with `partition`; none on the device with `offload`.
    Raises: TypeError or ValueError for sizes below 1; ValueError for `partition` without ranks to share.
    Source: ZeRO §6.1 (arXiv:1910.02054).
    """
    ranks = whole("tensor_parallel", tensor_parallel)
    if partition and ranks == 1:
        raise ValueError("partition=True and tensor_parallel is 1; it must be 2 or more, or partition=False")
    numel = whole("batch", batch) * whole("seq", seq) * whole("hidden", hidden)
    part_numel = -(-numel // ranks) if partition else numel
    held_bytes = whole("layers", layers) * part_numel * whole("bytes_per_element", bytes_per_element)
    return Placement(0, held_bytes) if offload else Placement(held_bytes, 0)


def recomputed_block(hidden: int, batch: int, seq: int, bytes_per_element: int = 2) -> int:
    """An estimate of the activation bytes of the one block that backward computes again: 12·b·s·h·w.

    The 12 tensors of `zerolab.memory.activations` are the same for any number of tensor-parallel ranks here,
    although most of them are divided: of a block of `zerolab.models` about 4 + 12/N_m were measured. So the
    estimate is too much for two ranks or more, and too little for one.

    Source: ZeRO §3.2, footnote (arXiv:1910.02054), for one block.
    """
    numel = whole("batch", batch) * whole("seq", seq) * whole("hidden", hidden)
    return 12 * numel * whole("bytes_per_element", bytes_per_element)


def rank_psi(psi: float, tensor_parallel: int, whole_psi: float = 0) -> float:
    """Return how many parameters each tensor-parallel rank has: its part of what is cut, and `whole_psi`.

    `zerolab.parallelize` cuts linear layers. Embeddings and the head stay whole on every rank: 0.8B of the
    7.1B that a rank has of a model of 100B. Data-parallel ranks then share the states of these parameters.

    Raises: TypeError or ValueError for sizes not finite or below 0, and for more whole parameters than psi.
    """
    ranks, kept = whole("tensor_parallel", tensor_parallel), number("whole_psi", whole_psi)
    if kept > number("psi", psi):
        raise ValueError(f"whole_psi is {whole_psi}; it must be at most psi, which is {psi}")
    return psi if ranks == 1 else (psi - kept) / ranks + kept


def largest_psi(rank_psi: float, tensor_parallel: int, whole_psi: float = 0) -> float:
    """Return how many parameters a model has of which each tensor-parallel rank has `rank_psi`; 0 if none."""
    ranks, kept = whole("tensor_parallel", tensor_parallel), number("whole_psi", whole_psi)
    if ranks == 1:
        return number("rank_psi", rank_psi)
    cut = number("rank_psi", rank_psi) - kept
    return ranks * cut + kept if cut >= 0 else 0


def offload_optimizer(states: ModelStates) -> tuple[ModelStates, float]:
    """Return the model states that stay on the device, and the bytes of the optimizer state outside it.

    It is moved in and out unit by unit, in each step. The units in transit are not counted here.

    Memory: KΨ/N_d less on the device. Comm: KΨ/N_d read and KΨ/N_d written a step, of host memory or disk.
    Source: ZeRO-Offload (arXiv:2101.06840) and ZeRO-Infinity (arXiv:2104.07857) keep it there, and update it
        on the CPU; here it comes to the device for its update.
    """
    return replace(states, optimizer_bytes=0), states.optimizer_bytes
