"""Lesson 01: its check names each classic mistake, its drawings are sound at every slider's ends."""

from itertools import product

import pytest
from support.lessons import spoken

from zerolab import memory
from zerolab.course.lessons.memory_accounting import check_bytes_per_gpu, figures, quiz


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


@pytest.mark.parametrize(
    ("solution", "diagnosis"),
    [
        (lambda psi, n, stage: None, "not written yet"),
        (formula(k=8), "the fp32 master weights are missing"),
        (formula(replicated_master=True), "only m and v are sharded"),
        (formula(scale=1e-9), "that is GB"),
        (formula(scale=2**-30), "that is GiB"),
        (formula(scale=8), "that is bits"),
        (formula(shards=(1, 1, 3)), "stage 1, 7B parameters on 8 GPUs: that is stage 2"),
        (formula(shards=(0, 0, 0)), "stage 0, 7B parameters on 8 GPUs: that divides everything"),
        (formula(shards=(1, 2, 2)), "stage 2, 7B parameters on 8 GPUs: that is stage 3"),
        (formula(params=4), "and the formula gives"),
    ],
)
def test_the_check_names_the_mistake(solution, diagnosis):
    assert diagnosis in check_bytes_per_gpu.diagnose(solution)


def test_the_wrong_numbers_of_activations_follow_from_the_formula():
    right = memory.activations(layers=48, hidden=1600, batch=32, seq=1024) / 1e9
    assert list(quiz.ACTIVATIONS.mistakes.values()) == pytest.approx([right / 2, right / 12], rel=1e-3)


STATES = list(product((1.5e9, 1e12), (1, 1024), (0, 3), ("mixed", "fp32")))


@pytest.mark.parametrize(("model", "gpus", "stage", "precision"), STATES)
def test_the_bars_say_what_a_gpu_holds(model, gpus, stage, precision):
    total = memory.model_states(model, gpus, stage, precision).total_bytes / 1e9
    alt = spoken(figures.stage_bars, model=model, gpus=gpus, stage=stage, precision=precision)
    assert f"{figures.STAGE_NAMES[stage]}: {total:.3g} GB each" in alt


@pytest.mark.parametrize(("batch", "checkpointing"), list(product((1, 64), (False, True))))
def test_activations_are_drawn_beside_the_states(batch, checkpointing):
    alt = spoken(figures.states_and_activations, batch=batch, checkpointing=checkpointing)
    assert f"batch {batch} ×" in alt and "optimizer state 18 GB" in alt


def test_the_other_drawings_say_what_they_show():
    assert spoken(figures.sixteen_bytes).startswith("The 16 bytes of one parameter")
    assert "stage 3: 0.117" in spoken(figures.per_gpu_curves)
