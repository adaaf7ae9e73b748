"""Lesson 07: its drawings say what they show, and its numbers are those that its text gives."""

import pytest
import torch
import torch.distributed as dist
from support.lessons import drawing, spoken

import zerolab
from zerolab import memory, models, paper
from zerolab.course.lessons.residual_memory import figures, quiz
from zerolab.course.lessons.residual_memory.saved import saved_bytes

LESSON = "residual_memory"
RUNS = 64, 128, 256, 400  # GPUs of the paper's Figure 3
MEASURED = 4 + 12 / 16  # tensors of a block on each of 16 ranks
STREAM_GB = 1024 * 8192 * 2 / 1e9  # one sequence


def test_the_pair_of_layers_has_an_f_and_a_g_on_each_rank():
    said = spoken(figures.split_pair, 2.1)
    assert "On each rank x goes through f" in said and "The two f add up over the ranks in backward" in said


def configurations(**moved) -> str:
    settings = {"model": "100B", "N_m": 16, "N_d": 25, "batch": 32}
    return spoken(drawing(LESSON, "configurations"), 3, **settings | moved)


@pytest.mark.parametrize(
    "moved",
    [
        {},
        {"N_m": 1, "N_d": 1},  # bars of very different lengths
        {"N_m": 32, "N_d": 64, "batch": 1, "model": "40B"},
        {"N_m": 4, "N_d": 64, "batch": 1, "model": "170B"},  # the parameters alone are too much
        {"N_m": 8, "N_d": 25, "batch": 12, "model": "60B"},
    ],
)
def test_the_explorer_is_legible_wherever_the_sliders_are(moved: dict):
    said = configurations(**moved)
    for bar in said.partition(": ")[2].rstrip(".").split("; "):
        total = float(bar.split()[1])
        assert ("does not fit" in bar) == (total > 32) and "fit" in bar, bar


def test_the_explorer_has_what_the_text_says_of_170_billion_parameters():
    """§10.5: it fits with C5 alone by the count of 12 tensors, and with C4, too, by 4 + 12/N_m."""
    bars = configurations(model="170B", batch=12).partition(": ")[2].split("; ")
    assert [bar.split()[0] for bar in bars if "does not fit" not in bar] == ["C5"]
    assert bars[3].startswith("C4 32.4 GB") and bars[4].startswith("C5 29.7 GB")
    on_a_gpu = drawing(LESSON, "on_a_gpu")(212, 8192, 12, ranks=16, copies=25, way="P_a")
    assert round(sum(on_a_gpu.values()) - (12 - MEASURED) * 12 * STREAM_GB, 1) == 30.9


def test_what_is_not_cut_is_as_large_as_the_text_says():
    """Embeddings, positions and head of the model of 100 billion parameters, on each of 16 × 25 GPUs."""
    whole = memory.model_states(2 * 50_257 * 8192 + 1024 * 8192, 25, stage=2).total_bytes
    assert round(whole / 1e9, 1) == 2.1


@pytest.mark.parametrize(("ranks", "tensors"), [(1, 16.1), (2, 10.1), (4, 7.1)])
def test_a_block_keeps_about_4_and_12_by_the_ranks_of_a_copy(ranks: int, tensors: float):
    kept = zerolab.launch(kept_by_a_block, ranks, timeout=60)
    assert [round(each, 1) for each in kept] == [tensors] * ranks
    assert tensors == pytest.approx(4 + 12 / ranks, abs=0.15)


def kept_by_a_block() -> float:
    """In units of b·s·h numbers, as in the lesson's cell."""
    parallel = zerolab.TensorParallel(dist.group.WORLD)
    torch.manual_seed(0)
    model = zerolab.parallelize(models.GPT(width=64, depth=1, heads=4, context=32), parallel)
    stream = torch.randn(8, 32, 64, requires_grad=True)
    return saved_bytes(model.blocks[0], stream) / (4 * stream.numel())


def test_saved_bytes_counts_each_storage_once_and_no_parameter():
    x = torch.randn(5, 8, requires_grad=True)
    linear = torch.nn.Linear(8, 8)
    assert saved_bytes(linear, x) == x.nbytes
    assert saved_bytes(torch.nn.Sequential(linear, torch.nn.Flatten(), linear), x) == 2 * x.nbytes
    assert saved_bytes(torch.nn.Identity(), x) == 0


def test_more_gpus_make_room_for_the_sequences_that_the_text_gives():
    fit = drawing(LESSON, "sequences_that_fit")
    assert [round(fit(gpus)) for gpus in RUNS] == [14, 38, 49, 54]
    used = {run.gpus: run.batch for run in paper.RUNS if run.figure == "3"}
    assert [used[gpus] for gpus in RUNS] == [16, 48, 48, 64]


def test_with_the_block_as_it_was_measured_the_estimate_is_too_lax():
    on_a_gpu, found = drawing(LESSON, "on_a_gpu"), []
    for gpus in RUNS:
        for_one = on_a_gpu(75, 8192, 1, ranks=16, copies=gpus // 16, way="P_a")
        each = for_one.pop("activations") - (12 - MEASURED) * STREAM_GB
        found.append(round((32 - 7.3 - sum(for_one.values())) / each))
    assert found == [25, 67, 87, 95]


def test_the_known_mistakes_of_figure_6_are_the_other_configurations():
    largest = drawing(LESSON, "largest")
    computed = [largest(*how) for how in ((1, "P_a"), (2, "whole"), (2, "P_a+cpu"))]
    assert list(quiz.C4.mistakes.values()) == pytest.approx(computed, rel=0.002)
    assert round(largest(1, "whole")) == 40 and round(largest(2, "P_a")) == 137


def test_what_a_reader_is_given_to_guess_c4_leads_to_it():
    block, checkpoint = 12 * 8192**2, 16 * 1024 * 8192 * 2
    states = [memory.model_states(block / 16, 25, stage).total_bytes for stage in (1, 2)]
    assert [round(each / 1e6) for each in (block, *states)] == [805, 225, 129]
    assert [round(each / 1e6) for each in (checkpoint, checkpoint / 16)] == [268, 17]
    by_hand = 24.7e9 / (129e6 + 17e6) * 805e6 / 1e9
    assert by_hand == pytest.approx(drawing(LESSON, "largest")(2, "P_a"), rel=quiz.C4.tolerance)
