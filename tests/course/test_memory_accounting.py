"""Lesson 01: its first check names each classic mistake, its drawings are sound at every slider's ends."""

from itertools import product

import numpy as np
import pytest
import torch
from support.lessons import drawing, solutions_travel_by_value, spoken

from zerolab import memory
from zerolab.course.lessons.memory_accounting import check_bytes_per_gpu, quiz

solutions_travel_by_value(__name__)


def formula(k=12, params=2, grads=2, shards=(1, 2, 3), scale=1.0, replicated_master=False):
    """The right formula where nothing is given, and a classic wrong one where something is."""
    on_optimizer, on_grads, on_params = shards

    def bytes_per_gpu(psi, n, stage):
        shared = lambda sharded_from: n if stage >= sharded_from else 1
        optimizer = k * psi / shared(on_optimizer)
        if replicated_master and stage >= 1:
            optimizer = 4 * psi + 8 * psi / n
        return (params * psi / shared(on_params) + grads * psi / shared(on_grads) + optimizer) * scale

    return bytes_per_gpu


def by_a_table(psi, n, stage):
    """Right: bytes that stay whole, and bytes that are divided."""
    whole, divided = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}[stage]
    return psi * whole + psi * divided // n


def by_cases(psi, n, stage):
    """Right: a number of numpy's, in one expression for each stage."""
    if stage == 0:
        return np.float64(16 * psi)
    if stage == 1:
        return np.float64(4 * psi + 12 * psi / n)
    return np.float64((2 * psi if stage == 2 else 0) + (14 if stage == 2 else 16) * psi / n)


def in_float32(psi, n, stage):
    """The sum of a tensor, which has 24 bits."""
    divisors = torch.tensor([n if stage >= first else 1 for first in (3, 2, 1)])
    return (torch.tensor([2.0, 2.0, 12.0]) * psi / divisors).sum()


@pytest.mark.parametrize("solution", [formula(), by_a_table, by_cases])
def test_every_right_way_passes(solution):
    assert check_bytes_per_gpu.diagnose(solution) is None


@pytest.mark.parametrize(
    ("solution", "diagnosis"),
    [
        (lambda psi, n, stage: None, "not written yet"),
        (
            formula(k=8),
            "4 bytes are missing, the size of the fp32 master weights, of m or of v",
        ),
        (formula(replicated_master=True), "only m and v are sharded"),
        (formula(scale=1e-9), "that is GB"),
        (formula(scale=2**-30), "that is GiB"),
        (formula(scale=8), "that is bits"),
        (formula(shards=(1, 1, 3)), "the gradients are sharded at stage 1 already"),
        (formula(shards=(0, 0, 0)), "stage 0, 7B parameters on 8 GPUs: that divides everything"),
        (
            formula(shards=(1, 2, 2)),
            "stage 2, 7B parameters on 8 GPUs: the parameters are sharded at stage 2",
        ),
        (formula(params=4), "the parameters have 2 bytes in mixed precision, not 4"),
        (formula(params=4, grads=4, k=8), "that is fp32 training"),
        (formula(k=10), "counts 2 bytes for a parameter, 2 for its gradient and 10 for its optimizer state"),
        (
            lambda psi, n, stage: psi * [16, 4 + 12 // n, 2 + 14 // n, 16 // n][stage],
            "are 16, 8, 5.5, 4.188: // rounds down",
        ),
        (
            formula(shards=(2, 1, 3)),
            "stage 1 divides the 12 bytes of optimizer state, and yours divides them at stage 2",
        ),
        (
            formula(shards=(2, 2, 3)),
            "stage 1, 7B parameters on 8 GPUs: your formula keeps 16 bytes per parameter",
        ),
        (lambda psi, n, stage: formula()(psi, n, stage) * n, "that is the sum over all GPUs"),
        (lambda psi, n, stage: formula()(psi, 8, stage), "8 whatever the number of GPUs"),
        (lambda psi, n, stage: formula()(psi, max(1, n - 1), stage), "divides by N - 1, the number of the"),
        (lambda psi, n, stage: formula()(7e9, n, stage), "7e9 parameters whatever psi is"),
        (lambda psi, n, stage: formula()(psi, n, stage + 1), "the stages are one too high"),
        (lambda psi, n, stage: psi**2, "and the formula gives"),
        (formula(k=4), "8 bytes are missing, the size of two of the fp32 master weights, m and v"),
        (lambda psi, n, stage: print(formula()(psi, n, stage)), "prints something and returns None"),
        (lambda psi, n, stage: formula(k=8)(psi, n, stage) / 1e9, "two mistakes. First, that is GB"),
        (lambda psi, n, stage: formula()(psi, n, stage) // 1e9 * 1e9, "that is rounded down to whole GB"),
        (lambda psi, n, stage: round(formula()(psi, n, stage) / 1e9, 1), "rounded to multiples of 0.1 GB"),
        (
            lambda psi, n, stage: formula()(psi, n, stage) + 3e9,
            "is 16 * psi + 3e+09, and right is 16 * psi: a number of",
        ),
        (lambda psi, n, stage: formula()(psi, n, stage) * 1.5, "counts 3 bytes for a parameter, 3 for its"),
        (lambda psi, n, stage: 16 * psi - formula()(psi, n, stage), "that is what is saved by sharding"),
        (lambda psi, n, stage: formula()(n, psi, stage), "psi and world_size are exchanged"),
        (
            lambda psi, n, stage: [16 * psi, 4 + 12 * psi / n, 2, 3][stage],
            "12 * psi / N + 4, and right is 4 * psi + 12 * psi / N: a number of bytes is not mult",
        ),
        (
            lambda psi, n, stage: psi * [16, 4 + 12 / n**2, 2 + 14 / n**2, 16 / n**2][stage],
            "is divided by the number of GPUs once, and yours divides twice",
        ),
        (
            lambda psi, n, stage: psi * [16, 8 + 8 / n, 6 + 10 / n, 16 / n][stage],
            "stage 1 divides 4 bytes more, the size of the master weights, of m or of v",
        ),
        (
            lambda psi, n, stage: psi * [16, 12 + 4 / n, 2 + 14 / n, 16 / n][stage],
            "stage 1 divides 8 bytes more, the size of two of the master weights, m and v",
        ),
        (
            lambda psi, n, stage: psi * [16, 2 + 14 / n, 16 / n, 16 / n][stage],
            "stage 1 keeps 2 bytes more on every GPU, the size of the gradients or of the weights",
        ),
        (
            lambda psi, n, stage: psi * [16, 4 + 12 / n, 2 + 12 / n, 16 / n][stage],
            "2 bytes for each parameter are missing at stage 2, the size of the gradients",
        ),
        (
            lambda psi, n, stage: psi * (16 - (0, 12, 14, 16)[stage] / n),
            "the sharded part is multiplied by (N-1)/N, which is what a GPU saves",
        ),
        (
            lambda psi, n, stage: psi * [16, 4 + 12 / n, 2 + 7 / n, 16 / 3 / n][stage],
            "the sharded part is divided by 2 * N",
        ),
        (
            lambda psi, n, stage: psi * [20, 8 + 12 / n, 6 + 14 / n, 4 + 16 / n][stage],
            "4 bytes for each parameter come on top, on every GPU",
        ),
        (
            lambda psi, n, stage: (
                psi * [16, 4 + 12 / (n - 1), 2 + 14 / (n - 1), 16 / (n - 1)][stage] if stage else 16 * psi
            ),
            "that divides by N - 1",
        ),
        (lambda psi, n, stage: f"{16 * psi} bytes", "returned str"),
        (in_float32, "right up to the rounding of float32, torch's default type"),
        (lambda psi, n, stage: psi / (n - 1), "your function stopped with ZeroDivisionError"),
        (
            lambda psi, n, stage: memory.model_states(psi, n, stage).total_bytes,
            "calls zerolab.memory.model_states, which has the formula",
        ),
    ],
)
def test_the_check_names_the_mistake(solution, diagnosis):
    assert diagnosis in check_bytes_per_gpu.diagnose(solution)


def test_the_wrong_numbers_of_activations_follow_from_the_formula():
    right = memory.activations(layers=48, hidden=1600, batch=32, seq=1024) / 1e9
    assert list(quiz.ACTIVATIONS.mistakes.values()) == pytest.approx([right / 2, right / 12], rel=1e-3)


STATES = list(product((0.1, 7.5, 2000), (1, 1024), (16, 141), ("mixed", "mixed_fp32_grads")))


@pytest.mark.parametrize(("model_billions", "gpus", "gpu_memory_GB", "precision"), STATES)
def test_the_bars_say_what_a_gpu_holds_and_whether_it_fits(model_billions, gpus, gpu_memory_GB, precision):
    alt = spoken(drawing("memory_accounting", "stage_bars"), 2.8, **locals())
    for stage in range(4):
        held = memory.model_states(model_billions * 1e9, gpus, stage, precision).total_bytes
        verdict = "fits" if held <= gpu_memory_GB * 1e9 else "does not fit"
        assert (
            f"stage {stage}: {memory.format_bytes(held)}, {verdict}".replace("stage 0", "data parallel")
            in alt
        )


@pytest.mark.parametrize(("batch", "checkpointing"), list(product((1, 64), ("off", "on"))))
def test_activations_are_drawn_beside_the_states(batch, checkpointing):
    alt = spoken(drawing("memory_accounting", "one_gpu"), 1.9, batch=batch, checkpointing=checkpointing)
    assert f"batch {batch} ×" in alt and "optimizer state 18 GB" in alt
    assert ("does not fit into" in alt) == (batch == 64 or (checkpointing == "off" and batch > 4))
