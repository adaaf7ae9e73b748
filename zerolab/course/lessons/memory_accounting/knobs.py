"""Find the wrong parts of a formula for the batch: its model states, its sample, its memory, its rounding.

Each part has a list of mistakes. One of them may explain all batches, or two of different parts. The samples
that fit into much memory tell the bytes of one.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from zerolab import memory

LAYERS, HIDDEN, SEQ, TENSORS, PSI = 48, 1600, 1024, 12, 1.5e9
SAMPLE = memory.activations(LAYERS, HIDDEN, 1, SEQ)  # bytes
States = Callable[[float, int, int], float]
"""From psi, the number of GPUs and the stage: the bytes of the model states."""


class Knob(NamedTuple):
    """A part of the formula, what is wrong with it, and the value or the function that stands there."""

    part: str
    why: str
    value: Any


# What a sample is too large by, and what leads to it.
_TOO_LARGE = {
    1 / HIDDEN: "the hidden size of 1600 is missing",
    HIDDEN: "the hidden size of 1600 counts twice",
    HIDDEN / SEQ: "the hidden size of 1600 counts twice, and the 1024 tokens do not count",
    SEQ / HIDDEN: "the 1024 tokens count twice, and the hidden size of 1600 does not count",
    SEQ: "the 1024 tokens count twice",
    LAYERS: "the 48 layers count twice",
    1 / (LAYERS * TENSORS): "the 48 layers and the 12 tensors of each are missing",
    2: "a number has 4 bytes, where 16 bits are 2 bytes, or layers, tensors or tokens count twice as often",
    4: "a number has 8 bytes, where 16 bits are 2 bytes",
    8: "a number has 16 bytes, where 16 bits are 2 bytes",
    16: "a number has 32 bytes, where 16 bits are 2 bytes",
    4 / 3: "16 tensors count for a layer, or a third more than 12: count 12 and nothing else",
}
_TENSORS = {
    count / TENSORS: f"{count} tensors count for a layer, and they are {TENSORS}"
    for count in range(1, 41)
    if count != TENSORS
}
_MEMORY = {
    1e9: "gpu_bytes is multiplied by 1e9, and it is in bytes already",
    2**30: "gpu_bytes is multiplied by 2**30, and it is in bytes already",
    2**30 / 1e9: "1 GB is taken for 2**30 bytes",
    1e9 / 2**30: "the memory is divided by 2**30, and the model states by 1e9",
}
_ROUNDING = {
    "the batch is rounded up: round down": np.ceil,
    "the batch is rounded to the nearest: round down": np.round,
    "the batch is one sample too many": lambda fit: np.floor(fit) + 1,
    "the batch is one sample too few": lambda fit: np.floor(fit) - 1,
}


def explained(
    batches: Mapping[tuple, float], states: States, wrong_states: Mapping[str, States]
) -> str | None:
    """Return the wrong part that explains the batches, or the two wrong parts."""
    cases = np.array(list(batches), dtype=np.float64)
    seen = np.array(list(batches.values()))
    right = Knob("states", "", states)
    knobs = _knobs(wrong_states)
    single = [knob.why for knob in knobs if _explains(cases, seen, [right, knob])]
    if single:
        return ", or else ".join(single)
    for one, other in combinations(knobs, 2):
        if one.part != other.part and _explains(cases, seen, [right, one, other]):
            return f"these are two mistakes. First, {one.why}. Second, {other.why}"
    return None


def _knobs(wrong_states: Mapping[str, States]) -> list[Knob]:
    samples = _TENSORS | _TOO_LARGE
    return [
        *(Knob("states", f"the model states are wrong: {why}", value) for why, value in wrong_states.items()),
        *(Knob("sample", f"a sample is wrong: {why}", factor * SAMPLE) for factor, why in samples.items()),
        *(Knob("memory", why, factor) for factor, why in _MEMORY.items()),
        *(Knob("rounding", why, rounding) for why, rounding in _ROUNDING.items()),
    ]


def _explains(cases: np.ndarray, seen: np.ndarray, knobs: Sequence[Knob]) -> bool:
    """Whether the formula with these parts gives the batches of all cases."""
    part = {knob.part: knob.value for knob in knobs}
    gpu_bytes = cases[:, 0] * part.get("memory", 1)
    held = [_held(part["states"], gpus, stage) for _, gpus, stage in cases]
    fit = (gpu_bytes - held) / part.get("sample", SAMPLE)
    batch = np.maximum(0, part.get("rounding", np.floor)(fit))
    return bool((np.abs(batch - seen) <= 1e-9 * seen + 1e-3).all())


def _held(states: States, gpus: float, stage: float) -> float:
    try:
        return states(PSI, int(gpus), int(stage))
    except ZeroDivisionError:
        return float("inf")
