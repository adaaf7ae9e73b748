"""Lesson 01's exercise: bytes per GPU by stage, and the wrong formulas that are often used."""

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
                known = _known_mistakes(want, psi, world_size, stage).items()
                named = [sentence for sentence, value in known if abs(got - value) <= 1e-6 * abs(value)]
                return f"{where}: {[*named, f'{got:.6g} bytes, and the formula gives {want:.6g}'][0]}"
    return None


def _known_mistakes(want: float, psi: float, n: int, stage: int) -> dict[str, float]:
    """The mistakes and the numbers they lead to, the most likely first."""
    kept_masters = 4 * psi * (1 - 1 / n)
    others = {other: memory.model_states(psi, n, other).total_bytes for other in _STAGES if other != stage}
    shards = "stage 1 shards the optimizer state, 2 the gradients too, 3 everything"
    return {
        "only m and v are sharded: the fp32 master weights are optimizer state too": want + kept_masters,
        "the fp32 master weights are missing: K is 12, not 8": want - 4 * psi / (n if stage else 1),
        "that is GB: return bytes": want / 1e9,
        "that is GiB: return bytes, and 1 GB is 1e9 of them": want / 2**30,
        "that mixes GB and GiB: 1 GB is 1e9 bytes, 1 GiB is 2**30": want * 1e9 / 2**30,
        "that is bits: a 16-bit number has 2 bytes": want * 8,
        "that divides everything by the number of GPUs: only what the stage shards shrinks": want / n,
        "that is 8 bytes per parameter: in mixed precision Adam itself keeps 12 (master, m, v)": psi * 8,
        **{f"that is stage {other}: {shards}": total for other, total in others.items()},
    }
