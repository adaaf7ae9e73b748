"""Compute the bytes per rank of the model states from Ψ, K, N and the stage.

Training holds three *model states* for each of Ψ parameters: the parameter, its gradient, and K bytes of
optimizer state. Plain data parallelism repeats all three on every rank; each ZeRO stage stops repeating one
more of them. That is `model_states`; below it is what else fills a GPU: activations and temporary buffers.

1 GB is 1e9 bytes, and 1 GiB is 2**30 bytes.
"""

import heapq
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from zerolab.checks import number as _number
from zerolab.checks import whole as _whole


@dataclass(frozen=True)
class Convention:
    """Bytes that one parameter costs in each model state, under one convention of the field."""

    params_bytes: int
    grads_bytes: int
    master_bytes: int  # the fp32 copy that the optimizer updates; none where parameters are fp32 themselves
    meaning: str


CONVENTIONS = {
    "mixed": Convention(2, 2, 4, "16-bit parameters and gradients, fp32 master weights: 2+2+12 with Adam"),
    "fp32": Convention(4, 4, 0, "everything in fp32, no second copy of the weights: 4+4+8 with Adam"),
    "mixed_fp32_grads": Convention(2, 4, 4, "as mixed, but gradients are kept in fp32: 2+4+12 with Adam"),
}

# How many fp32 numbers an optimizer remembers for each parameter.
OPTIMIZER_MOMENTS = {"adam": 2, "adamw": 2, "sgd": 0, "momentum": 1, "muon": 1, "rmsprop": 1, "adagrad": 1}


@dataclass(frozen=True)
class ModelStates:
    """Bytes on one rank, by model state; not whole where N does not divide Ψ, as padding is not counted."""

    params_bytes: float
    grads_bytes: float
    optimizer_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.params_bytes + self.grads_bytes + self.optimizer_bytes

    def __add__(self, other: "ModelStates") -> "ModelStates":
        return ModelStates(
            self.params_bytes + other.params_bytes,
            self.grads_bytes + other.grads_bytes,
            self.optimizer_bytes + other.optimizer_bytes,
        )


def optimizer_bytes_per_parameter(optimizer: str = "adam", precision: str = "mixed") -> int:
    """The paper's K: an optimizer's fp32 moments, and the fp32 master weights where precision is mixed.

    The master weights are optimizer state too: to shard only m and v leaves 4 of Adam's 12 bytes repeated.

    Source: ZeRO §3.1 (arXiv:1910.02054), K = 12 for mixed-precision Adam.
    """
    moments = _choice("optimizer", optimizer, OPTIMIZER_MOMENTS, "; or give its bytes per parameter as k")
    return _choice("precision", precision, CONVENTIONS).master_bytes + 4 * moments


def model_states(
    psi: float,
    world_size: int,
    stage: int,
    precision: str = "mixed",
    k: float | None = None,
    frozen_psi: float = 0,
    own_share: float | None = None,
) -> ModelStates:
    """Bytes of parameters, gradients and optimizer state on each of `world_size` ranks.

    `psi` counts the trainable parameters, `frozen_psi` the others: a frozen parameter has no gradient and no
    optimizer state, so it costs its own bytes alone, and stage 3 shards it like any other parameter.
    `own_share` is the part of the parameters that one rank owns, 1/N by default. Where ranks own whole
    parameters, as for Muon, each has another share; their mean is 1/N.

    Memory: with K=12, 16Ψ at stage 0, then 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N and 16Ψ/N.
    Raises: TypeError or ValueError for sizes not finite or below 0, world sizes below 1, unknown names.
    Source: ZeRO §5, Figure 1 and Table 1 (arXiv:1910.02054).
    """
    psi, frozen_psi = _number("psi", psi), _number("frozen_psi", frozen_psi)
    world_size, stage = _whole("world_size", world_size), _whole("stage", stage, 0, 3)
    per_parameter, k = _conventions(precision, k)
    own_share = None if own_share is None else _number("own_share", own_share)
    # Not psi * (1 / N): that is rounded twice, and 93B on 93 ranks would be more than 1B.
    own = lambda numel: numel / world_size if own_share is None else numel * own_share
    held = lambda numel, sharded_from: own(numel) if stage >= sharded_from else numel
    return ModelStates(
        params_bytes=per_parameter.params_bytes * held(psi + frozen_psi, 3),
        grads_bytes=per_parameter.grads_bytes * held(psi, 2),
        optimizer_bytes=k * held(psi, 1),
    )


def largest_share(sizes: Iterable[float], world_size: int) -> float:
    """The part of all `sizes` that is on the rank that has most, where each is on one rank as a whole.

    The largest goes first, each to the rank that has the least so far. So it is 1/N or a little more; with
    more ranks than sizes it is what the largest has.

    Raises: TypeError or ValueError for sizes that are no finite numbers >= 0, or world sizes below 1.
    Source: longest processing time first, R. L. Graham, Bounds on Multiprocessing Timing Anomalies (1969)
    """
    ordered = sorted((_number("a size", size) for size in sizes), reverse=True)
    loads = [0.0] * min(_whole("world_size", world_size), max(1, len(ordered)))
    for size in ordered:
        heapq.heapreplace(loads, loads[0] + size)
    return max(loads) / sum(ordered) if sum(ordered) else 1 / world_size


def bytes_per_parameter(stage: int, precision: str = "mixed", k: float | None = None) -> tuple[float, float]:
    """What one parameter costs as (replicated, sharded): every rank pays the first, and 1/N of the second.

    Everything that more ranks can and cannot do for memory is in these two numbers.
    """
    stage = _whole("stage", stage, 0, 3)
    per_parameter, k = _conventions(precision, k)
    costs = ((3, per_parameter.params_bytes), (2, per_parameter.grads_bytes), (1, k))
    sharded = sum(cost for sharded_from, cost in costs if stage >= sharded_from)
    return sum(cost for _, cost in costs) - sharded, sharded


def largest_model(
    gpu_memory_bytes: float,
    world_size: int,
    stage: int,
    precision: str = "mixed",
    k: float | None = None,
    model_parallel: int = 1,
) -> int:
    """Return the most parameters whose model states alone fill the memory of each GPU.

    An upper bound, as activations and buffers need room too: where the paper computes 7.6B (stage 1, 64 GPUs
    of 32 GB) it trained 6.2B. `model_parallel` splits the model before ZeRO does, so the sizes multiply.

    Source: ZeRO Table 2 (arXiv:1910.02054); its lower rows double rounded cells, this formula does not.
    """
    memory, world_size = _number("gpu_memory_bytes", gpu_memory_bytes), _whole("world_size", world_size)
    replicated, sharded = bytes_per_parameter(stage, precision, k)
    # memory = (replicated + sharded / N) * psi, times N throughout so that integers stay exact
    psi = int(memory * world_size // (replicated * world_size + sharded))
    return psi * _whole("model_parallel", model_parallel)


def smallest_world_size(
    psi: float, gpu_memory_bytes: float, stage: int, precision: str = "mixed", k: float | None = None
) -> int | None:
    """Return how many ranks it takes until the model states fit, or None if no number of ranks is enough.

    None is why there are later stages: what a stage replicates, no number of GPUs can shrink.
    """
    psi, memory = _number("psi", psi), _number("gpu_memory_bytes", gpu_memory_bytes)
    replicated, sharded = (cost * psi for cost in bytes_per_parameter(stage, precision, k))
    if replicated + sharded <= memory:
        return 1
    if sharded == 0 or memory <= replicated:
        return None
    return int(-(-sharded // (memory - replicated)))  # rounded up


def activations(
    layers: int,
    hidden: int,
    batch: int,
    seq: int,
    checkpointing: bool = False,
    segment_layers: int | None = None,
    bytes_per_element: int = 2,
) -> int:
    """An estimate of the activation bytes one GPU keeps from forward to backward; no stage divides them.

    A GPT-2-like layer keeps about 12 tensors of batch x seq x hidden. With checkpointing only the input of
    each segment stays, and one segment at a time is computed again in full, for about a third more compute.
    A segment is floor(sqrt(layers)) layers unless told. GPT-2 1.5B at batch 32, sequence 1024: 60.4 GB, with
    checkpointing 8.4 GB; the paper says "about 60" and "about 8", and gives no formula for the second.

    Left out: logits, dropout masks, attention scores (seq squared, unless fused); take it for the scale.

    Source: 12 x hidden x batch x seq x layers is ZeRO §3.2, footnote (arXiv:1910.02054); segments of
        sqrt(layers) are Chen et al. (arXiv:1604.06174), cited there; adding the two terms up is ours.
    """
    layers, batch, seq = _whole("layers", layers), _whole("batch", batch), _whole("seq", seq)
    tensor_bytes = batch * seq * _whole("hidden", hidden) * _whole("bytes_per_element", bytes_per_element)
    if not checkpointing and segment_layers is not None:
        raise ValueError(f"segment_layers is {segment_layers}; it needs checkpointing=True as well")
    if not checkpointing:
        return 12 * layers * tensor_bytes
    segment = segment_layers if segment_layers is not None else math.isqrt(layers)
    segment = _whole("segment_layers", segment, 1, layers)
    return (math.ceil(layers / segment) + 12 * segment) * tensor_bytes


def fused_buffer_bytes(psi: float) -> float:
    """One flat fp32 buffer for all gradients, 6 GB for GPT-2 1.5B: what working bucket by bucket avoids.

    Source: ZeRO §3.2, temporary buffers, and §6.2, constant-size buffers (arXiv:1910.02054).
    """
    return 4 * _number("psi", psi)


_BYTES = {"B": 1, "kB": 1000, "KB": 1000, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_COUNTS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_bytes(text: str | float) -> float:
    """Bytes from "32GB" (32e9), "32GiB" (32 * 2**30) or a plain number; "32G" and "32Gb" are refused."""
    return _parse("size", text, _BYTES, 'as in "32GB" or "32GiB"; GB is 1e9 bytes, GiB 2**30')


def parse_count(text: str | float) -> float:
    """Return a number of parameters from "7.5B", "350M", "1T" or a plain number."""
    return _parse("count", text, _COUNTS, 'as in "7.5B" or "350M"')


def format_bytes(n: float, unit: str = "GB") -> str:
    """At least three significant digits and the unit's name: "31.4 GB", "0.117 GB", "4000 GB", "29.2 GiB"."""
    return f"{_digits(_number('n', n) / _choice('unit', unit, _BYTES))} {unit}"


def format_count(n: float) -> str:
    """Return a number of parameters as the field writes it: "124M", "7.50B", "1.00T"."""
    letter = next((letter for letter in ("T", "B", "M", "K") if _number("n", n) >= _COUNTS[letter]), "")
    return _digits(n / _COUNTS.get(letter, 1)) + letter


def _digits(value: float) -> str:
    magnitude = math.floor(math.log10(float(f"{value:.2e}"))) if value else 2
    return f"{value:.{max(0, 2 - magnitude)}f}"


def _parse(what: str, text: str | float, units: dict[str, int], example: str) -> float:
    if not isinstance(text, str):
        return _number(what, text)
    spellings = {"": 1} | units | {unit.lower(): size for unit, size in units.items()}
    match = re.fullmatch(r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in spellings:
        raise ValueError(f"{what} is {text!r}; write a number >= 0 and one of {', '.join(units)}, {example}")
    number = float(match[1]) * spellings[match[2]]
    return int(number) if _number(what, number).is_integer() else number


Chosen = TypeVar("Chosen")


def _choice(name: str, value: str, choices: Mapping[str, Chosen], way_out: str = "") -> Chosen:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}{way_out}")
    return choices[value]


def _conventions(precision: str, k: float | None) -> tuple[Convention, float]:
    way_out = "; mixed counts bf16 and fp16 alike"
    per_parameter = _choice("precision", precision, CONVENTIONS, way_out)
    return per_parameter, optimizer_bytes_per_parameter("adam", precision) if k is None else _number("k", k)
