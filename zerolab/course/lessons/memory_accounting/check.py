"""Lesson 01's exercise: bytes per GPU by stage, and the wrong formulas that are often used."""

from collections.abc import Callable
from itertools import product

from zerolab.course.exercise import graded
from zerolab.course.lessons.memory_accounting.asked import Case
from zerolab.course.lessons.memory_accounting.by_stage import by_parts
from zerolab.course.lessons.memory_accounting.numbers import (
    UNITS,
    Answers,
    Question,
    mistake_in,
    numbers,
    units_mistaken,
)
from zerolab.course.lessons.memory_accounting.solution import bytes_per_gpu
from zerolab.course.lessons.memory_accounting.stage_parts import RIGHT

PSI, GPUS, STAGES = (7e9, 1.5e9, 192e6), (8, 1, 3, 64), tuple(RIGHT)
CASES = [(psi, n, stage) for stage, psi, n in product(STAGES, PSI, GPUS)]
HINTS = (
    "per parameter there are 2 bytes of weights, 2 bytes of gradients and 12 bytes of optimizer state.",
    "stage 1 divides the 12 bytes by the number of GPUs, stage 2 the gradients' 2 bytes as well, stage 3 "
    "all.",
    "write three lines, one for each category: its bytes, divided by world_size if stage >= 1 (or 2, or 3) "
    "and by 1 otherwise. Return their sum, in bytes.",
)


def states(psi, n, stage, *, params=2, grads=2, optimizer=12, whole=0, sharded_from=(3, 2, 1)):
    """The formula, with a knob for each part of it; `whole`: bytes of optimizer state that stay undivided."""
    by = [n if stage >= first else 1 for first in sharded_from]
    undivided = whole if stage else 0
    return psi * (params / by[0] + grads / by[1] + undivided + (optimizer - undivided) / by[2])


# A sentence, and the formula that the mistake leads to.
# fmt: off
MISTAKES: dict[str, Callable[[float, int, int], float]] = {
    "only m and v are sharded: the fp32 master weights are optimizer state too":
        lambda psi, n, stage: states(psi, n, stage, whole=4),
    "4 bytes are missing, the size of the fp32 master weights, of m or of v: K is 12, not 8":
        lambda *case: states(*case, optimizer=8),
    "8 bytes are missing, the size of two of the fp32 master weights, m and v: K is 12, not 4":
        lambda *case: states(*case, optimizer=4),
    "that is what is saved by sharding, and a GPU holds the rest: return what it holds":
        lambda psi, n, stage: 16 * psi - states(psi, n, stage),
    "that is bytes per parameter: multiply by psi":
        lambda *case: states(*case) / case[0],
    "that is the sum over all GPUs: return the bytes of one":
        lambda *case: states(*case) * case[1],
    "that divides everything by the number of GPUs: only what the stage shards shrinks":
        lambda psi, n, stage: 16 * psi / n,
    "no stage shards anything: that is data parallelism's 16 bytes at every stage":
        lambda psi, n, stage: 16 * psi,
    "the stages are one too high: stage 1 shards the optimizer state only":
        lambda psi, n, stage: states(psi, n, stage + 1),
    "the stages are one too low: stage 1 shards the optimizer state already":
        lambda psi, n, stage: states(psi, n, stage - 1),
    "the order of the stages is wrong: 1 shards the optimizer state, 2 the gradients too, 3 everything":
        lambda *case: states(*case, sharded_from=(1, 2, 3)),
    "each stage shards its own category only: a stage shards what the stages before it shard, too":
        lambda psi, n, stage: psi * (16 - (size := {1: 12, 2: 2, 3: 2}.get(stage, 0)) + size / n),
    "the gradients have 2 bytes in mixed precision, not 4":
        lambda *case: states(*case, grads=4),
    "the parameters have 2 bytes in mixed precision, not 4: the fp32 copy is in the optimizer's 12":
        lambda *case: states(*case, params=4),
    "that is 4 + 4 + 12: in mixed precision parameters and gradients have 2 bytes each":
        lambda *case: states(*case, params=4, grads=4),
    "that is fp32 training, 4 + 4 + 8: in mixed precision it is 2 + 2 + 12":
        lambda *case: states(*case, params=4, grads=4, optimizer=8),
    "the parameters are missing: add their 2 bytes":
        lambda *case: states(*case, params=0),
    "the gradients are missing: add their 2 bytes":
        lambda *case: states(*case, grads=0),
    "that is the optimizer state alone: add parameters and gradients":
        lambda *case: states(*case, params=0, grads=0),
    "the optimizer state is missing: add its 12 bytes":
        lambda *case: states(*case, optimizer=0),
    "that is 8 bytes per parameter: in mixed precision Adam itself keeps 12 (master, m, v)":
        lambda psi, n, stage: psi * 8,
    "the gradients are sharded at stage 1 already: stage 1 shards the optimizer state only":
        lambda *case: states(*case, sharded_from=(3, 1, 1)),
    "the parameters are sharded at stage 2 already: that is stage 3's work":
        lambda *case: states(*case, sharded_from=(2, 2, 1)),
    "stage 2 does not shard the gradients: it divides their 2 bytes, too":
        lambda *case: states(*case, sharded_from=(3, 3, 1)),
    "the gradients are never sharded: stages 2 and 3 divide their 2 bytes":
        lambda *case: states(*case, sharded_from=(3, 9, 1)),
    "the parameters are never sharded: stage 3 divides their 2 bytes":
        lambda *case: states(*case, sharded_from=(9, 2, 1)),
    "the optimizer state is sharded at stage 0 already: stage 0 is plain data parallelism":
        lambda *case: states(*case, sharded_from=(3, 2, 0)),
    "that multiplies where it should divide by the number of GPUs":
        lambda psi, n, stage: states(psi, 1 / n, stage),
    "that divides by the stage and not by the number of GPUs":
        lambda psi, n, stage: states(psi, stage, stage),
    "that divides by 8 whatever the number of GPUs: use world_size":
        lambda psi, n, stage: states(psi, 8, stage),
    "that divides by N - 1, the number of the other GPUs: a GPU's share is one of N parts":
        lambda psi, n, stage: states(psi, max(1, n - 1), stage),
    "that divides by N + 1: a GPU's share is one of N parts":
        lambda psi, n, stage: states(psi, n + 1, stage),
    "psi and world_size are exchanged: it is called with (psi, world_size, stage)":
        lambda psi, n, stage: states(n, psi, stage),
    "that has 7e9 parameters whatever psi is: use psi":
        lambda psi, n, stage: states(7000000000.0, n, stage),
}
# fmt: on


@graded(
    "Your formula gives the paper's bytes at every stage.",
    call="bytes_per_gpu(psi, world_size, stage)",
    hints=HINTS,
    solution=[bytes_per_gpu],
)
def check_bytes_per_gpu(fn: Callable) -> str | None:
    """Compare fn(psi, world_size, stage), in bytes, with the formula, and name the wrong one it follows."""
    return mistake_in(fn, QUESTION)


def _per_parameter(answers: Answers, first: Case) -> str | None:
    """What a stage's answers are per parameter, where they are neither whole nor divided by N."""
    stage, found = first[2], numbers(answers)
    if found is None:
        return None
    by_psi = [[found[psi, n, stage] / psi for n in sorted(GPUS)] for psi in PSI]
    if all(abs(found[psi, n, stage] - found[PSI[0], n, stage]) < 1 for n in GPUS for psi in PSI):
        return (
            "your answer is the same for 1.5B and 7B parameters: it is a number of bytes for each, times psi"
        )
    if any(
        abs(one - other) > 1e-6 * abs(one)
        for row in by_psi
        for one, other in zip(row, by_psi[0], strict=True)
    ):
        return None
    show = lambda values: ", ".join(f"{value:.4g}" for value in values)
    right = [states(1, n, stage) for n in sorted(GPUS)]
    floors = all(got == value // 1 for got, value in zip(by_psi[0], right, strict=True))
    return (
        f"your formula gives {show(by_psi[0])} bytes per parameter on {show(sorted(GPUS))} GPUs, and right "
        f"are {show(right)}{': // rounds down to whole bytes of a parameter, so divide with /' * floors}"
    )


QUESTION = Question(
    CASES,
    states,
    MISTAKES | units_mistaken(states),
    where=lambda case: (
        f"stage {case[2]}, {case[0] / 1e9:g}B parameters on {case[1]} GPU{'s' * (case[1] > 1)}"
    ),
    unit="bytes",
    source="2, 2 and 12 bytes",
    units=UNITS,
    read=by_parts,
    read_last=_per_parameter,
)
