"""Lesson 01: the checks of frozen weights and of the largest batch name each classic mistake."""

import math

import numpy as np
import pytest
from support.lessons import solutions_travel_by_value

from zerolab import memory, presets
from zerolab.course.lessons.memory_accounting import check_adapter_bytes, check_largest_batch
from zerolab.plan import Question

solutions_travel_by_value(__name__)


def states(psi, n, stage, params=2, grads=2, k=12):
    shared = lambda sharded_from: n if stage >= sharded_from else 1
    return params * psi / shared(3) + grads * psi / shared(2) + k * psi / shared(1)


# ---- the second exercise: frozen weights


def beside_frozen(frozen_bytes=2, frozen_from=3, whole_states=False, trained=(2, 2, 12), top=0, scale=1.0):
    """The right formula where nothing is given, and a classic wrong one where something is."""

    def adapter_bytes(frozen, trained_count, n, stage):
        shared = lambda sharded_from: n if stage >= sharded_from else 1
        held = 16 * frozen if whole_states else frozen_bytes * frozen / shared(frozen_from)
        held += top * frozen
        for size, sharded_from in zip(trained, (3, 2, 1), strict=True):
            held += size * trained_count / shared(sharded_from)
        return held * scale

    return adapter_bytes


def from_the_first_exercise(frozen, trained, n, stage):
    """Right: the states of the trained ones, and weights of the others."""
    return states(trained, n, stage) + states(frozen, n, stage, grads=0, k=0)


def by_a_table_of_stages(frozen, trained, n, stage):
    """Right: whole numbers, in one line for each stage."""
    if stage == 3:
        return np.float64((2 * frozen + 16 * trained) / n)
    whole, divided = {0: (16, 0), 1: (4, 12), 2: (2, 14)}[stage]
    return int(2 * frozen + whole * trained + divided * trained // n)


@pytest.mark.parametrize("solution", [beside_frozen(), from_the_first_exercise, by_a_table_of_stages])
def test_every_right_way_to_count_frozen_weights_passes(solution):
    assert check_adapter_bytes.diagnose(solution) is None


@pytest.mark.parametrize(
    ("solution", "diagnosis"),
    [
        (lambda frozen, trained, n, stage: None, "not written yet"),
        (lambda frozen, trained, n, stage: states(frozen + trained, n, stage), "16 bytes for every param"),
        (
            lambda frozen, trained, n, stage: (
                beside_frozen()(frozen, trained, n, stage) + states(frozen, n, stage, params=0, k=0)
            ),
            "the frozen parameters are counted with gradients",
        ),
        (beside_frozen(frozen_bytes=4), "the frozen weights are counted in fp32"),
        (beside_frozen(frozen_bytes=0), "the frozen weights are missing"),
        (beside_frozen(frozen_from=9), "counted whole at stage 3, too"),
        (beside_frozen(frozen_from=1), "counted as sharded at stage 1 already"),
        (beside_frozen(frozen_from=2), "counted as sharded at stage 2 already"),
        (
            beside_frozen(trained=(2, 2, 8)),
            "4 bytes of each trained parameter are missing",
        ),
        (beside_frozen(trained=(0, 2, 12)), "the trained parameters' own 16-bit weights are missing"),
        (beside_frozen(trained=(2, 0, 12)), "the trained parameters' gradients are missing"),
        (beside_frozen(trained=(0, 0, 0)), "the trained parameters are missing"),
        (beside_frozen(scale=1e-9), "that is GB"),
        (lambda f, t, n, stage: 2 * f + 16 * t, "no stage shards anything"),
        (lambda f, t, n, stage: (2 * f + 16 * t) / n, "that divides everything"),
        (lambda f, t, n, stage: beside_frozen()(t, f, n, stage), "are swapped"),
        (lambda f, t, n, stage: beside_frozen()(f - t, t, n, stage), "do not subtract them"),
        (lambda f, t, n, stage: beside_frozen()(f, t, n, stage) * n, "the sum over all GPUs"),
        (
            beside_frozen(top=3),
            "keeps 5 bytes of each frozen parameter on every GPU and divides 0 by the number of GPUs. At "
            "stage 0 right are 2 and 0",
        ),
        (beside_frozen(trained=(2, 2, 10)), "keeps 14 bytes of each trained parameter on every GPU"),
        (lambda f, t, n, stage: f * t, "bytes, and the formula gives"),
        (
            lambda f, t, n, stage: (
                (2 * f / (n if stage == 3 else 1)) / (n if stage == 3 else 1)
                + beside_frozen(frozen_bytes=0)(f, t, n, stage)
            ),
            "so it divides 2 bytes of each frozen parameter by the number of GPUs twice",
        ),
        (
            lambda f, t, n, stage: beside_frozen()(f, t, n, stage) // 1e9 * 1e9,
            "that is rounded down to whole GB: return the bytes as they are",
        ),
        (lambda f, t, n, stage: beside_frozen()(f, t, n, stage) + 2e9, "+ 2e+09: some bytes come on top"),
        (
            beside_frozen(trained=(4, 4, 8)),
            "stage 1 divides 4 bytes more, the size of the master",
        ),
        (beside_frozen(frozen_bytes=4, scale=1e-9), "two mistakes. First, that is GB"),
        (lambda f, t, n, stage: float("nan"), "returned nan"),
        (
            lambda f, t, n, stage: memory.model_states(t, n, stage).total_bytes + 2 * f,
            "calls zerolab.memory.model_states",
        ),
    ],
)
def test_the_second_check_names_the_mistake(solution, diagnosis):
    assert diagnosis in check_adapter_bytes.diagnose(solution)


# ---- the third exercise: the largest batch

SAMPLE = 12 * 48 * 1024 * 1600 * 2


def beside_states(held=states, sample=lambda n, stage: SAMPLE, of_batch=lambda fit, n: max(0, int(fit // 1))):
    """The right formula where nothing is given, and a classic wrong one where something is."""

    def largest_batch(gpu_bytes, n, stage):
        return of_batch((gpu_bytes - held(1.5e9, n, stage)) / sample(n, stage), n)

    return largest_batch


def one_more_each_time(gpu_bytes, n, stage):
    """Right: try 1, 2, 3, … until it does not fit, with the package's own functions."""
    batch, held = 0, memory.model_states(1.5e9, n, stage).total_bytes
    while held + memory.activations(48, 1600, batch + 1, 1024) <= gpu_bytes:
        batch += 1
    return batch


def halving(gpu_bytes, n, stage):
    """Right: a binary search between two batches."""
    low, high = 0, 1 << 20
    while high - low > 1:
        middle = (low + high) // 2
        if states(1.5e9, n, stage) + middle * SAMPLE <= gpu_bytes:
            low = middle
        else:
            high = middle
    return float(low)


def in_gigabytes(gpu_bytes, n, stage):
    """Right, with numbers that are rounded: where a batch fits exactly, it may be one less."""
    return max(0, int((gpu_bytes / 1e9 - states(1.5, n, stage)) / (SAMPLE / 1e9)))


def refuses_where_none_fits(gpu_bytes, n, stage):
    if gpu_bytes < states(1.5e9, n, stage) + SAMPLE:
        raise ValueError("it does not fit")
    return beside_states()(gpu_bytes, n, stage)


def planned(gpu_bytes, n, stage):
    """The package's own answer."""
    gpt2 = presets.model("zero-1.5b")
    return Question(gpt2, n, gpu_bytes, "mixed", 12, 1, 1, 1024, False).largest_batch(stage)


@pytest.mark.parametrize("solution", [beside_states(), one_more_each_time, halving, in_gigabytes])
def test_every_right_way_to_find_the_batch_passes(solution):
    assert check_largest_batch.diagnose(solution) is None


@pytest.mark.parametrize(
    ("solution", "diagnosis"),
    [
        (lambda gpu, n, stage: None, "not written yet"),
        (
            beside_states(of_batch=lambda fit, n: min(99, max(0, int(fit)))),
            "no batch above 99 is ever returned",
        ),
        (
            beside_states(of_batch=lambda fit, n: next((b for b in (64, 32, 16, 8, 4, 2, 1) if b <= fit), 0)),
            "only powers of two are tried, up to 64: every whole number is a batch",
        ),
        (
            beside_states(of_batch=lambda fit, n: next((b for b in (16, 8, 4, 2, 1) if b < fit), 0)),
            "only powers of two are tried, up to 16: every whole number is a batch",
        ),
        (
            beside_states(of_batch=lambda fit, n: next((b for b in (1024, 32, 1) if b <= fit), 0)),
            "stage 0, 1 GPU of 32 GB: 1 samples, and the formula gives 4",
        ),
        (beside_states(of_batch=lambda fit, n: int(abs(fit))), "abs() makes another number"),
        (
            lambda gpu, n, stage: beside_states()(gpu / n, n, stage),
            "the memory of a GPU is divided by the number",
        ),
        (
            lambda gpu, n, stage: int(gpu // (states(1.5e9, n, stage) + SAMPLE)),
            "the model states count once for each sample",
        ),
        (beside_states(sample=lambda n, stage: 1.9e9), "a sample is rounded to 1.9 GB"),
        (planned, "calls zerolab.plan.question."),
        (beside_states(held=lambda psi, n, stage: 0), "the model states are missing"),
        (beside_states(held=lambda psi, n, stage: 16 * psi), "those of plain data parallelism"),
        (beside_states(held=lambda psi, n, stage: 2 * psi), "only the 16-bit weights are counted"),
        (
            beside_states(held=lambda *case: states(*case, k=8)),
            "4 bytes are missing from the model states, the size of the master weights",
        ),
        (
            beside_states(sample=lambda n, stage: SAMPLE / n),
            "each GPU has its own samples, which no stage shards",
        ),
        (beside_states(sample=lambda n, stage: SAMPLE / 48), "those of one layer"),
        (beside_states(sample=lambda n, stage: 2 * SAMPLE), "count 4 bytes each"),
        (beside_states(sample=lambda n, stage: SAMPLE / 1024), "that is the number of tokens"),
        (beside_states(of_batch=lambda fit, n: max(0, int(fit)) * n), "that of one"),
        (
            beside_states(held=lambda psi, n, s: psi * (4 / (n if s > 1 else 1) + 8 / (n if s else 1))),
            "those of 12 bytes of model states for a parameter, and there are 16",
        ),
        (
            beside_states(held=lambda psi, n, s: psi * (6 + 4 / (n if s else 1))),
            "those of 10 bytes of model states for a parameter",
        ),
        (lambda gpu, n, s: beside_states()(0.9 * gpu, n, s), "your formula uses only 90% of the memory"),
        (
            lambda gpu, n, s: beside_states()(gpu * 1e9 / 2**30, n, s),
            "the memory of the GPU is divided by 2**30, and the states by 1e9",
        ),
        (lambda gpu, n, s: beside_states()(gpu / 2, n, s), "your formula uses only 50% of the memory"),
        (
            lambda gpu, n, s: max(0, int((n * gpu - n * states(1.5e9, n, s)) // SAMPLE)),
            "or all GPUs' samples are counted",
        ),
        (beside_states(sample=lambda n, stage: SAMPLE / 2), "or half of the layers or of the tokens"),
        (beside_states(sample=lambda n, stage: SAMPLE * (n - 1)), "with stage 0, 1 GPU of 32 GB"),
        (beside_states(sample=lambda n, stage: SAMPLE * stage), "division by zero, with stage 0"),
        (beside_states(of_batch=lambda fit, n: max(0, -int(-fit // 1))), "round down, with // or int()"),
        (beside_states(of_batch=lambda fit, n: max(0, fit)), "a whole number of samples: round down"),
        (beside_states(of_batch=lambda fit, n: fit // 1), "return 0 and nothing negative"),
        (beside_states(of_batch=lambda fit, n: max(1, int(fit))), "return 0, not 1"),
        (beside_states(of_batch=lambda fit, n: max(0, round(fit))), "rounded to the nearest"),
        (
            lambda gpu, n, stage: beside_states()(gpu * n, n, stage),
            "that pools the memory of all GPUs",
        ),
        (
            beside_states(sample=lambda n, stage: SAMPLE * 1.37),
            "your formula takes about 2.59 GB for a sample, and it keeps 1.89 GB",
        ),
        (
            beside_states(held=lambda psi, n, stage: states(psi, n, stage) + 9e9),
            "those of 22 bytes of model states for a parameter",
        ),
        (
            beside_states(held=lambda psi, n, stage: states(1.3 * psi, n, stage) + 1e9),
            "your 0 would be right if the model states took more than 30.1 GB",
        ),
        (
            beside_states(of_batch=lambda fit, n: round(fit)),
            "where the states alone do not fit, no sample fits: return 0 there, and nothing negative",
        ),
        (lambda gpu, n, stage: "many", "returned str 'many': return a number of samples"),
        (
            beside_states(held=lambda psi, n, stage: states(7e9, n, stage)),
            "the model states are wrong: that has 7e9 parameters whatever psi is",
        ),
        (
            beside_states(held=lambda *case: states(*case, params=4, grads=4, k=8)),
            "the model states are wrong: that is fp32 training, 4 + 4 + 8",
        ),
        (beside_states(sample=lambda n, stage: 8 * SAMPLE), "a number has 16 bytes, where 16 bits are 2"),
        (beside_states(sample=lambda n, stage: SAMPLE * 1600 / 1024), "and the 1024 tokens do not count"),
        (beside_states(sample=lambda n, stage: SAMPLE * 4 / 3), "16 tensors count for a layer, or a third"),
        (beside_states(sample=lambda n, stage: SAMPLE * 10 / 12), "10 tensors count for a layer, and they"),
        (lambda gpu, n, s: beside_states()(1e9 * gpu, n, s), "gpu_bytes is multiplied by 1e9, and it is in"),
        (
            beside_states(held=lambda *case: states(*case, grads=4), sample=lambda n, stage: 8 * SAMPLE),
            "two mistakes. First, the model states are wrong: the gradients have 2 bytes in mixed precision, "
            "not 4. Second, a sample is wrong: a number has 16 bytes",
        ),
        (
            beside_states(
                held=lambda *case: states(*case, grads=4), of_batch=lambda fit, n: max(0, math.ceil(fit))
            ),
            "not 4. Second, the batch is rounded up",
        ),
        (
            beside_states(of_batch=lambda fit, n: max(0, math.ceil(fit) - 1)),
            "stage 0, 1 GPU of 31.55 GB: model states and 4 samples fill this memory to the last byte, and "
            "your batch is 3. They fit: compare with <=",
        ),
        (refuses_where_none_fits, "All other answers are right, and here 0 is right: return it, and do not"),
    ],
)
def test_the_third_check_names_the_mistake(solution, diagnosis):
    assert diagnosis in check_largest_batch.diagnose(solution)
