"""Lesson 01: its check names each classic mistake, its drawings are sound at every slider's ends."""

from itertools import product

import pytest
from support.lessons import drawing, spoken

from zerolab import memory
from zerolab.course.lessons.memory_accounting import check_bytes_per_gpu, quiz


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
