"""Lesson 01's third exercise: the largest batch beside the model states of GPT-2."""

import math
from collections.abc import Callable, Mapping
from itertools import product

from zerolab import memory
from zerolab.course.exercise import graded
from zerolab.course.lessons.memory_accounting.asked import Case
from zerolab.course.lessons.memory_accounting.check import MISTAKES as STATES
from zerolab.course.lessons.memory_accounting.check import STAGES, states
from zerolab.course.lessons.memory_accounting.knobs import HIDDEN, LAYERS, PSI, SAMPLE, SEQ, explained
from zerolab.course.lessons.memory_accounting.numbers import Answers, Question, mistake_in, numbers
from zerolab.course.lessons.memory_accounting.solution import largest_batch

HUGE = (5e11, 1.5e12)  # so much memory that the batches tell the bytes of a sample
GPU_BYTES, GPUS = (32e9, 16e9, 24.5e9, 80e9), (1, 8, 3, 64)
CASES = [(*case, stage) for stage, *case in product(STAGES, GPU_BYTES, GPUS)]
CASES += [(gpu, 8, stage) for stage in STAGES for gpu in HUGE]
# A batch that fills the GPU to the last byte.
EXACT = [
    (states(PSI, n, stage) + fit * SAMPLE, n, stage)
    for n, stage, fit in ((1, 0, 4), (3, 1, 1), (8, 2, 3), (64, 3, 7), (8, 3, 16))
]
HINTS = (
    "first the model states of GPT-2 at this stage: 16 bytes per parameter, in part divided by world_size. "
    "The rest of the memory is for activations.",
    "one sample of 1024 tokens keeps 12 * 48 * 1024 * 1600 numbers of 2 bytes. No stage divides them.",
    "the batch is how often a sample fits into the rest, rounded down with //, and max(0, ...) of that where "
    "the states alone do not fit.",
)


def batch(gpu, n, stage, *, sample=SAMPLE, held=None, round_by=math.floor, least=0):
    """Return the formula, with a knob for each part of it; `held`: the bytes of the model states."""
    held = states(PSI, n, stage) if held is None else held
    return max(least, round_by((gpu - held) / sample))


# A sentence, and the formula that the mistake leads to.
# fmt: off
MISTAKES: dict[str, Callable[[float, int, int], float]] = {
    "the model states are missing, or are in GB beside memory in bytes: activations get what they leave":
        lambda gpu, n, stage: batch(gpu, n, stage, held=0),
    "the model states are those of plain data parallelism: the stage divides a part of them":
        lambda gpu, n, stage: batch(gpu, n, stage, held=16 * PSI),
    "the model states are divided by the number of GPUs at every stage: only what the stage shards is":
        lambda gpu, n, stage: batch(gpu, n, stage, held=16 * PSI / n),
    "only the 16-bit weights are counted as model states: gradients and optimizer state are missing":
        lambda gpu, n, stage: batch(gpu, n, stage, held=2 * PSI),
    "4 bytes are missing from the model states, the size of the master weights, of m or of v: K is 12, not 8":
        lambda gpu, n, stage: batch(gpu, n, stage, held=states(PSI, n, stage, optimizer=8)),
    "the activations are divided by the number of GPUs, or all GPUs' samples are counted: each GPU has its "
    "own samples, which no stage shards":
        lambda gpu, n, stage: batch(gpu, n, stage, sample=SAMPLE / n),
    "the activations are divided by the number of GPUs from stage 1 on: no stage shards them":
        lambda gpu, n, stage: batch(gpu, n, stage, sample=SAMPLE / (n if stage else 1)),
    "the activations are divided by the number of GPUs at stage 3: no stage shards them":
        lambda gpu, n, stage: batch(gpu, n, stage, sample=SAMPLE / (n if stage == 3 else 1)),
    "everything is divided by the number of GPUs: no stage divides activations, and stage 0 divides nothing":
        lambda gpu, n, stage: batch(gpu, n, stage, sample=SAMPLE / n, held=16 * PSI / n),
    "that is the batch of all GPUs together: return that of one":
        lambda gpu, n, stage: batch(gpu, n, stage) * n,
    "that is a GPU's batch divided by the number of GPUs: it is the batch of one already":
        lambda gpu, n, stage: batch(gpu, n, stage) // n,
    "that pools the memory of all GPUs: each has to hold its own states and activations":
        lambda gpu, n, stage: batch(gpu * n, n, stage),
    "the memory of the GPU is divided by 2**30, and the states by 1e9: take bytes for both":
        lambda gpu, n, stage: batch(gpu * 1e9 / 2**30, n, stage),
    "the last sample does not fit: round down, with // or int()":
        lambda gpu, n, stage: batch(gpu, n, stage, round_by=math.ceil),
    "that is one sample too many: it is the first batch that does not fit":
        lambda gpu, n, stage: batch(gpu, n, stage, least=-1) + 1,
    "where the states alone do not fit, the batch is 0: abs() makes another number of what is missing":
        lambda gpu, n, stage: math.floor(abs(gpu - states(PSI, n, stage)) / SAMPLE),
    "the memory of a GPU is divided by the number of GPUs: each has all of its own":
        lambda gpu, n, stage: batch(gpu / n, n, stage),
    "the model states count once for each sample: they are there once, so subtract them before you divide":
        lambda gpu, n, stage: math.floor(gpu / (states(PSI, n, stage) + SAMPLE)),
    "a sample is rounded to 1.9 GB: take its bytes as they are":
        lambda gpu, n, stage: batch(gpu, n, stage, sample=1.9e9),
    "that is rounded to the nearest: a sample that fits by half does not fit":
        lambda gpu, n, stage: batch(gpu, n, stage, round_by=round),
    "a batch is a whole number of samples: round down, with // or int()":
        lambda gpu, n, stage: batch(gpu, n, stage, round_by=float),
    "that is not rounded, and negative where the states alone do not fit: round down, and return 0 there":
        lambda gpu, n, stage: batch(gpu, n, stage, round_by=float, least=-math.inf),
    "where the states alone do not fit, no sample fits: return 0 and nothing negative, max(0, ...)":
        lambda gpu, n, stage: batch(gpu, n, stage, least=-math.inf),
    "where the states alone do not fit int() rounds up to a negative number: no sample fits, so return 0":
        lambda gpu, n, stage: batch(gpu, n, stage, least=-math.inf, round_by=int),
    "where the states alone do not fit, no sample fits: return 0, not 1":
        lambda gpu, n, stage: batch(gpu, n, stage, least=1),
    "the activations are those of one layer: there are 48":
        lambda gpu, n, stage: batch(gpu, n, stage, sample=SAMPLE / LAYERS),
    "a layer keeps 12 tensors, not one":
        lambda gpu, n, stage: batch(gpu, n, stage, sample=SAMPLE / 12),
    "the activations count 1 byte each, where a 16-bit number has 2; or half of the layers or of the tokens, "
    "where there are 48 and 1024":
        lambda gpu, n, stage: batch(gpu, n, stage, sample=SAMPLE / 2),
    "the activations count 4 bytes each: they are 16-bit here, 2 bytes":
        lambda gpu, n, stage: batch(gpu, n, stage, sample=SAMPLE * 2),
    "that is the number of tokens: a sample has 1024 of them":
        lambda gpu, n, stage: batch(gpu, n, stage, sample=SAMPLE / SEQ),
    "that is with activation checkpointing: here everything is kept":
        lambda gpu, n, stage: batch(gpu, n, stage, sample=memory.activations(LAYERS, HIDDEN, 1, SEQ, True)),
    "that takes 1 GB for 2**30 bytes":
        lambda gpu, n, stage: batch(gpu / 1e9 * 2**30, n, stage),
    "that is the largest power of two: every whole number is a batch":
        lambda gpu, n, stage: 2 ** int(math.log2(fit)) if (fit := batch(gpu, n, stage)) else 0,
    "that is the answer for 32 GB whatever the memory is: use gpu_bytes":
        lambda gpu, n, stage: batch(32e9, n, stage),
    "that is the answer for 64 GPUs whatever their number is: use world_size":
        lambda gpu, n, stage: batch(gpu, 64, stage),
    "the stages are one too high: stage 1 shards the optimizer state only":
        lambda gpu, n, stage: batch(gpu, n, stage + 1),
    "the stages are one too low: stage 1 shards the optimizer state already":
        lambda gpu, n, stage: batch(gpu, n, stage - 1),
    "that is the memory that activations get: divide it by the bytes of a sample":
        lambda gpu, n, stage: gpu - states(PSI, n, stage),
    "that is the memory of the activations of the batch: return the number of samples":
        lambda gpu, n, stage: batch(gpu, n, stage) * SAMPLE,
}
# fmt: on


@graded(
    "Your batches are the largest that fit. What a stage frees, the batch can use: 4 samples at stage 0 on "
    "32 GB, and 16 at stage 3 on 64 of them.",
    call="largest_batch(gpu_bytes, world_size, stage)",
    hints=HINTS,
    solution=[largest_batch],
)
def check_largest_batch(fn: Callable) -> str | None:
    """Compare fn(gpu_bytes, world_size, stage), in samples, with the formula."""
    return mistake_in(fn, QUESTION)


def _one_less(gpu, n, stage):
    """Where a batch fits exactly, a formula in GB may be rounded to one sample less."""
    return batch(gpu, n, stage) - ((gpu, n, stage) in EXACT)


def _strictly_less(answers: Answers) -> str | None:
    """Whether no batch that fills the memory exactly was taken. One alone may be rounding."""
    found = numbers(answers) or {}
    if all(found.get(case) == _one_less(*case) for case in EXACT):
        return (
            f"{_where(EXACT[0])}: model states and {batch(*EXACT[0]):g} samples fill this memory to the last "
            f"byte, and your batch is {found[EXACT[0]]:g}. They fit: compare with <=, and not with <"
        )
    return None


def _by_parts(answers: Answers, first: Case) -> str | None:
    """Read the answers as a rest of memory that is divided by the bytes of a sample."""
    found, stage = numbers(answers), first[2]
    if found and min(found.values()) < 0:
        return "where the states alone do not fit, no sample fits: return 0 there, and nothing negative"
    if found is None:
        return None
    if told := explained({case: got for case, got in found.items() if case not in EXACT}, states, STATES):
        return told
    if told := _of_a_search(found):
        return told
    if found[HUGE[0], 8, stage] == found[HUGE[1], 8, stage]:
        return None
    sample = (HUGE[1] - HUGE[0]) / (found[HUGE[1], 8, stage] - found[HUGE[0], 8, stage])
    if abs(sample / SAMPLE - 1) > 0.01:
        share = round(SAMPLE / sample, 2)  # as exact as whole samples tell
        if all(value == batch(c[0] * share, *c[1:]) for c, value in found.items() if c[2] == stage):
            return f"your formula uses only {share:.0%} of the memory; use all of it here"
        return (
            f"your formula takes about {sample / 1e9:.3g} GB for a sample, and it keeps {SAMPLE / 1e9:.3g} GB"
        )
    got, right = found[first], batch(*first)
    if stage == 0 and (size := _bytes_each(found)):
        return (
            f"your batches at stage 0 are those of {size} bytes of model states for a parameter, and there "
            "are 16: 2 of weights, 2 of gradients, 4 of master weights, 4 of m and 4 of v"
        )
    bound = first[0] - (got if got > right else got + 1) * SAMPLE
    than = "at most" if got > right else "more than"
    return (
        f"your {got:g} would be right if the model states took {than} {bound / 1e9:.3g} GB. They take "
        f"{states(PSI, *first[1:]) / 1e9:.3g}, and a sample {SAMPLE / 1e9:.3g}"
    )


def _of_a_search(found: Mapping[Case, float]) -> str | None:
    """Whether the batches are those of a loop that tries some numbers alone."""
    largest = max(found.values())
    if all(value in _powers_of_two(case, largest) for case, value in found.items()):
        return (
            f"only powers of two are tried, up to {largest:g}: every whole number is a batch, and the "
            "formula gives it without trying"
        )
    if all(value == min(batch(*case), largest) for case, value in found.items()):
        return f"no batch above {largest:g} is ever returned: does a loop end there? The formula needs none"
    return None


def _powers_of_two(case: Case, most: float) -> set[int]:
    """Return the largest power of two that is a batch, up to `most`; of an exact fit also the one below."""
    fits = (min(batch(*case), most), min(_one_less(*case), most))
    return {2 ** int(math.log2(fit)) if fit else 0 for fit in fits}


def _bytes_each(found: Mapping[Case, float]) -> int | None:
    """Return the bytes for each parameter that explain all batches of stage 0."""
    asked = [case for case in found if case[2] == 0]
    sizes = [size for size in range(0, 33, 2) if size != 16]
    fit = [s for s in sizes if all(found[case] == batch(*case, held=s * PSI) for case in asked)]
    return fit[0] if len(fit) == 1 else None


def _where(case: Case) -> str:
    return f"stage {case[2]}, {case[1]} GPU{'s' * (case[1] > 1)} of {case[0] / 1e9:.4g} GB"


QUESTION = Question(
    CASES + EXACT,
    batch,
    MISTAKES,
    where=_where,
    unit="samples",
    source="the states' bytes and those of a sample",
    forbidden=("zerolab.plan",),
    read_last=_by_parts,
    also_right=_one_less,
    edges=_strictly_less,
)
