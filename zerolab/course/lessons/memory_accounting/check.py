"""Lesson 01's exercise: bytes per GPU by stage, and the wrong formulas that circulate."""

from collections.abc import Callable

from zerolab import memory
from zerolab.course.exercise import graded

CASES = ((7e9, 8), (1.5e9, 1), (7.5e9, 64))  # (parameters, GPUs)
_STAGES = (0, 1, 2, 3)


@graded("Your formula gives the paper's bytes at every stage.")
def check_bytes_per_gpu(fn: Callable) -> str | None:
    """Compare fn(psi, world_size, stage), in bytes, with the formula, and name the wrong one it follows."""
    for psi, world_size in CASES:
        for stage in _STAGES:
            got, want = fn(psi, world_size, stage), memory.model_states(psi, world_size, stage).total_bytes
            if got is None:
                return "not written yet: the function returned None"
            if abs(got - want) > 1e-9 * want:
                where = f"stage {stage}, {psi / 1e9:g}B parameters on {world_size} GPUs"
                return f"{where}: {_mistake(got, psi, world_size, stage)}"
    return None


def _mistake(got: float, psi: float, world_size: int, stage: int) -> str:
    want = memory.model_states(psi, world_size, stage).total_bytes
    for value, sentence in _known_mistakes(psi, world_size, stage, want):
        if abs(got - value) <= 1e-6 * abs(value):
            return sentence
    return f"{got:.6g} bytes, and the formula gives {want:.6g}"


def _known_mistakes(psi: float, n: int, stage: int, want: float) -> list[tuple[float, str]]:
    """Wrong numbers and what makes them, the likeliest first."""
    other = {s: memory.model_states(psi, n, s).total_bytes for s in _STAGES}
    mistakes = [
        (want / 1e9, "that is GB: return bytes"),
        (want / 2**30, "that is GiB: return bytes, and 1 GB is 1e9 of them"),
        (want * 1e9 / 2**30, "that mixes GB and GiB: 1 GB is 1e9 bytes, 1 GiB is 2**30"),
        (want * 8, "that is bits: a 16-bit number has 2 bytes"),
        (want / n, "that divides everything by the number of GPUs: only what the stage shards shrinks"),
        (psi * 8, "that is 8 bytes a parameter: under mixed precision Adam itself keeps 12 (master, m, v)"),
    ]
    if stage >= 1:
        master = 4 * psi * (1 - 1 / n)
        mistakes.insert(
            0, (want + master, "only m and v are sharded: the fp32 master weights are optimizer state too")
        )
        mistakes.insert(1, (want - 4 * psi / n, "the fp32 master weights are missing: K is 12, not 8"))
    else:
        mistakes.insert(0, (want - 4 * psi, "the fp32 master weights are missing: K is 12, not 8"))
    for s in _STAGES:
        if s != stage:
            mistakes.append(
                (
                    other[s],
                    f"that is stage {s}: stage 1 shards the optimizer state, 2 the gradients too, 3 all",
                )
            )
    return mistakes
