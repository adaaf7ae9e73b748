"""Promise: a plan says what fits and why not; a bad value is named, with its bound and the way out."""

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import plans
from support.plans import cells

from zerolab import cost, memory, presets
from zerolab.__main__ import main
from zerolab.plan.question import Question

GPT2_XL = "--model gpt2-xl --gpus 64 --gpu-memory 32GB"


@pytest.fixture
def plan(capsys):
    return lambda words: plans.ask(words) or capsys.readouterr().out


def test_gpt2_xl_on_64_gpus(plan):
    text = plan(GPT2_XL)
    assert cells(text, "= model states") == ["24.9", "6.52", "3.46", "0.389"]
    assert cells(text, "activations (estimate)") == ["60.4"] * 4
    assert cells(text, "fits") == ["NO"] * 4
    assert cells(text, "to spare, or missing (-)") == ["-53.3", "-34.9", "-31.9", "-28.8"]
    assert cells(text, "largest batch that fits") == ["3", "13", "15", "16"]
    assert cells(text, "largest model, states alone") == ["2.00B", "7.64B", "14.4B", "128B"]
    assert cells(text, "elements, the paper's count") == ["2Ψ", "2Ψ", "2Ψ", "3Ψ"]
    assert "stage 0, 1, 2, 3: activations alone take 60.4 GB, and no stage shards them." in text
    assert "With --checkpointing activations take 8.39 GB instead of 60.4 GB, and stage 1 fits." in text


def test_checkpointing_does_what_the_advice_promised(plan):
    text = plan(f"{GPT2_XL} --checkpointing")
    assert cells(text, "fits") == ["NO", "yes", "yes", "yes"]
    assert "Stage 1 is the smallest that fits, with 17.1 GB to spare." in text
    assert "batch of 120 instead of 97" in text


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_largest_batch_fits_and_one_more_does_not(plan, stage):
    batch = int(cells(plan(GPT2_XL), "largest batch that fits")[stage])
    answers = [cells(plan(f"{GPT2_XL} --batch {b}"), "fits")[stage] for b in (batch, batch + 1)]
    assert answers == ["yes", "NO"]


def test_the_number_of_gpus_advised_is_the_first_that_fits(plan):
    words = "--model llama2-70b --gpu-memory 80GiB --batch 1 --seq 4096 --checkpointing --gpus"
    text = plan(f"{words} 8")
    gpus = int(re.search(r"With (\d+) GPUs stage 3 fits", text)[1])
    assert "every GPU keeps 138 GB of states whole beside 7.11 GB" in " ".join(text.split())
    assert [cells(plan(f"{words} {n}"), "fits")[3] for n in (gpus - 1, gpus)] == ["NO", "yes"]


def test_a_bare_size_has_no_activations(plan):
    text = plan("--psi 7.5B --gpus 64 --gpu V100-32GB --micro-batches 4")
    assert "activations are not counted" in text
    assert "activations (estimate)" not in text
    assert cells(text, "= model states") == ["120", "31.4", "16.6", "1.88"]
    assert cells(text, "elements, the paper's count") == ["2Ψ", "2Ψ", "5Ψ", "12Ψ"]
    assert cells(text, "GB each GPU sends per step") == ["29.5", "29.5", "73.8", "177"]  # 2 bytes, 63/64


def test_conventions_are_chosen_and_said(plan):
    text = plan("--psi 1B --gpus 2 --gpu T4 --precision fp32 --optimizer momentum")
    assert "fp32: 4 + 4 + 4 bytes per parameter" in text
    assert cells(text, "optimizer state") == ["4.00", "2.00", "2.00", "2.00"]
    assert "2 + 4 + 6 bytes" in plan("--psi 1B --gpus 2 --gpu T4 --precision mixed_fp32_grads --k 6")


def test_gradients_of_other_bytes_are_sent_as_such(plan):
    """Parameters have 2 bytes and gradients 4: 8, 6, 6 and 8 bytes per parameter, of which 7/8 are sent."""
    words = "--psi 8B --gpus 8 --gpu T4 --precision mixed_fp32_grads --tflops 1e5 --link 7GB --latency 0"
    text = plan(words)
    assert cells(text, "GB each GPU sends per step") == ["56.0", "42.0", "42.0", "56.0"]
    assert cells(text, "of ZeRO's messages") == ["8.00", "6.00", "6.00", "8.00"]
    assert cells(plan(f"{words} --micro-batches 3"), "GB each GPU sends per step")[2] == "98.0"


def test_states_that_fill_the_memory_exactly_fit(plan):
    """16 bytes of 93B parameters on 93 GPUs are 16 GB each, and 18 of 7.5B on 135 are 1 GB."""
    text = plan("--psi 93B --gpus 93 --gpu T4")
    assert (cells(text, "fits")[3], cells(text, "to spare, or missing (-)")[3]) == ("yes", "0")
    words = "--psi 7.5B --gpu-memory 1GB --precision mixed_fp32_grads --gpus"
    assert "With 135 GPUs stage 3 fits" in plan(f"{words} 64")
    assert cells(plan(f"{words} 135"), "fits")[3] == "yes"


QUESTIONS = st.builds(
    Question,
    model=st.sampled_from([*presets.MODELS.values()]),
    gpus=st.just(1),
    gpu_memory_bytes=st.integers(10**9, 10**11),
    precision=st.sampled_from([*memory.CONVENTIONS]),
    k=st.sampled_from([4, 8, 12]),
    micro_batches=st.just(1),
    batch=st.integers(1, 4),
    seq=st.sampled_from([16, 1024]),
    checkpointing=st.booleans(),
)


@settings(deadline=None)
@given(QUESTIONS, st.integers(1, 3))
def test_the_gpus_needed_are_the_first_that_fit(question, stage):
    if (gpus := question.gpus_needed(stage)) is not None:
        assert replace(question, gpus=gpus).fits(stage)
        assert gpus == 1 or not replace(question, gpus=gpus - 1).fits(stage)


def test_cells_keep_apart(plan):
    text = plan("--psi 100 --gpus 1024 --gpu T4")
    assert cells(text, "parameters") == ["2e-07", "2e-07", "2e-07", "1.95e-10"]
    assert cells(plan("--psi 1000000000000B --gpus 3 --gpu T4"), "parameters")[0] == "2e+12"


def test_a_model_whose_embedding_alone_is_larger_has_a_size(plan):
    words = "--model gpt3-175b --gpus 64 --gpu-memory 8GB --batch 1 --seq 16"
    assert cells(plan(words), "largest model, states alone")[0] == "500M"


def test_what_the_table_does_not_count_is_said_and_compared(plan):
    """The root has 617M parameters, the embedding; each of 96 blocks 1.82B, of which two are whole."""
    text = " ".join(plan("--model gpt3-175b --gpus 2048 --gpu T4 --batch 1 --checkpointing").split())
    assert "whole at a time, about 8.50 GB at stage 2 and 17.0 GB at stage 3." in text
    assert "That is more than stage 3 has to spare, so it does not fit." in text
    assert "than stage" not in plan("--model gpt2 --gpus 8 --gpu T4 --batch 1")
    assert "whole at a time" not in plan("--model gpt2 --gpus 1 --gpu T4") + plan(
        "--psi 1B --gpus 8 --gpu T4"
    )


def test_what_stage_3_sends_less_than_the_paper_counts_is_said(plan):
    """The embedding of gpt2 has 38.6M parameters, of two bytes; 7/8 of them are sent."""
    text = " ".join(plan("--model gpt2 --gpus 8 --gpu T4 --batch 1").split())
    assert "the paper's 3Ψ for what is sent. This engine sends 0.0675 GB less, because it gathers" in text
    assert "0.135 GB less" in plan("--model gpt2 --gpus 8 --gpu T4 --batch 1 --micro-batches 2")
    for words in ("--model gpt2 --gpus 1 --gpu T4", "--psi 1B --gpus 8 --gpu T4"):
        assert "This engine sends" not in plan(words)


def test_what_checkpointing_counts_and_the_logits_are_said(plan):
    """Segments of √48 blocks; 32 x 1024 x 50,257 logits of two bytes."""
    text = " ".join(plan(f"{GPT2_XL} --checkpointing").split())
    assert "with checkpoints of 6 blocks each" in text
    assert "The logits are not counted: 3.29 GB wherever" in text
    assert "logits" not in plan("--psi 1B --gpus 8 --gpu T4")


def test_beyond_any_number_of_gpus(plan):
    assert "More GPUs alone will not do" in plan("--model gpt3-175b --gpus 8 --gpu T4 --batch 64")


@pytest.mark.parametrize("words", [GPT2_XL, f"{GPT2_XL} --batch 1", "--model gpt3-175b --gpus 9999 --gpu T4"])
def test_a_plan_is_at_most_100_columns_wide(plan, words):
    assert max(map(len, plan(words).splitlines())) <= 100


REFUSED = {
    "--model gpt2-xxl --gpus 4 --gpu T4": "model 'gpt2-xxl' is not known; near it: gpt2-xl",
    "--psi 7B --gpus 4 --gpu V100": "GPU 'V100' is not known; near it: V100-16GB, V100-32GB",
    "--psi nan --gpus 4 --gpu T4": "count is 'nan'; write a number >= 0 and one of K, M, B, T",
    "--psi 0 --gpus 4 --gpu T4": "--psi is 0; it must be at least 1 parameter",
    "--psi 7B --gpus 0 --gpu T4": "--gpus is 0; it must be 1 or more",
    "--psi 7B --gpus -2 --gpu T4": "--gpus is -2; it must be 1 or more",
    "--psi 7B --gpus 4 --gpu T4 --micro-batches 0": "--micro-batches is 0; it must be 1 or more",
    "--psi 7B --gpus 4 --gpu-memory 32G": "size is '32G'; write a number",
    "--psi 7B --gpus 4 --gpu-memory 0GB": "--gpu-memory is 0GB, which is 0 bytes; write its unit",
    "--psi 7B --gpus 4 --gpu-memory 32": "--gpu-memory is 32, which is 32 bytes; write its unit",
    "--psi 7B --gpus 4 --gpu T4 --k nan": "k is nan; it must be a finite number from 0",
    "--psi 7B --gpus 4 --gpu T4 --precision bf16": "precision is 'bf16'; it must be one of mixed, fp32",
    "--psi 7B --gpus 4 --gpu T4 --optimizer lion": "optimizer is 'lion'; it must be one of adam",
    "--psi 7B --gpus 4 --gpu T4 --optimizer muon": "the layers of a model are not known, so neither are its",
    "--model gpt2 --gpus 4 --gpu T4 --optimizer muon --tensor-parallel 2": "--tensor-parallel is 2, and Muon",
}


@pytest.mark.parametrize("words", REFUSED)
def test_the_command_refuses_in_one_line(capsys, words):
    assert main(["plan", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"zerolab plan: {REFUSED[words]}")
    assert err.count("\n") == 1


BAD_SIZES = {ValueError: [math.nan, math.inf, -1, 10**400], TypeError: [True, "7.5B", None, 1j]}
BAD_COUNTS = {ValueError: [0, -2, 10**30], TypeError: [True, 4.0, "4", None]}
BAD_STAGES = {ValueError: [4, -1], TypeError: [True, "2", 2.0]}
TAKES_SIZE = [
    ("psi", lambda bad: memory.model_states(bad, 4, 1)),
    ("psi", lambda bad: memory.smallest_world_size(bad, 1e9, 1)),
    ("psi", lambda bad: cost.communication_volume(bad, 1)),
    ("frozen_psi", lambda bad: memory.model_states(1, 4, 1, frozen_psi=bad)),
    ("gpu_memory_bytes", lambda bad: memory.largest_model(bad, 4, 1)),
    ("payload_bytes", lambda bad: cost.wire_bytes(bad, 4, "all_gather")),
    ("latency_seconds", lambda bad: cost.collective_seconds(1, 4, "all_gather", bad, 1)),
    ("bandwidth_bytes_per_second", lambda bad: cost.collective_seconds(1, 4, "all_gather", 0, bad)),
]
TAKES_COUNT = [
    ("world_size", lambda bad: memory.model_states(1, bad, 1)),
    ("world_size", lambda bad: memory.largest_model(1, bad, 1)),
    ("world_size", lambda bad: cost.wire_bytes(1, bad, "all_gather")),
    ("model_parallel", lambda bad: memory.largest_model(1, 1, 1, model_parallel=bad)),
    ("micro_batches", lambda bad: cost.communication_volume(1, 2, bad)),
    ("units", lambda bad: cost.communication_seconds(1, 1, 4, 0, 1, units=bad)),
    ("layers", lambda bad: memory.activations(bad, 1, 1, 1)),
]
TAKES_STAGE = [
    ("stage", lambda bad: memory.model_states(1, 1, bad)),
    ("stage", lambda bad: cost.communication_volume(1, bad)),
]
GROUPS = [
    (
        TAKES_SIZE,
        BAD_SIZES,
        ["a finite number from 0 to 1e+24, such as 1.5e9", "give a number such as 1.5e9"],
    ),
    (TAKES_COUNT, BAD_COUNTS, ["a whole number from 1 to 1e+24", "give an int, 1 or more"]),
    (TAKES_STAGE, BAD_STAGES, ["a whole number from 0 to 3", "give an int, 0 or more"]),
]
BAD_VALUES = [
    pytest.param(call, bad, error, name, hints, id=f"{name}={bad!r:.8}")
    for takers, bad_values, hints in GROUPS
    for name, call in takers
    for error, values in bad_values.items()
    for bad in values
]


@pytest.mark.parametrize(("call", "bad", "error", "name", "hints"), BAD_VALUES)
def test_bad_numbers_are_named_with_bound_and_way_out(call, bad, error, name, hints):
    with pytest.raises(error) as caught:
        call(bad)
    message = str(caught.value)
    assert message.startswith(f"{name} is {bad!r}")
    assert any(hint in message for hint in hints)


BAD_CHOICES = [
    ("precision is 'bf16'; it must be one of mixed, fp32,", lambda: memory.model_states(1, 1, 1, "bf16")),
    ("collective is 'gather'; it must be one of reduce_", lambda: cost.wire_bytes(1, 2, "gather")),
    ("unit is 'Gb'; it must be one of B, kB", lambda: memory.format_bytes(1, "Gb")),
    (
        "bandwidth_bytes_per_second is 0; it must be above 0",
        lambda: cost.collective_seconds(1, 2, "all_gather", 0, 0),
    ),
    ("segment_layers is 2; it needs checkpointing=True", lambda: memory.activations(4, 1, 1, 1, False, 2)),
    (
        "segment_layers is 9; it must be a whole number from 1 to 4",
        lambda: memory.activations(4, 1, 1, 1, True, 9),
    ),
    ("GPU is 5, of type int; give one of T4", lambda: presets.machine(5)),
]


@pytest.mark.parametrize(("message", "call"), BAD_CHOICES)
def test_bad_choices_are_answered_with_the_good_ones(message, call):
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}"):
        call()


MUON_ON_1024 = "--model gpt2-xl --gpu-memory 32GB --optimizer muon --gpus 1024"


def test_muon_counts_what_the_rank_with_the_largest_share_holds(plan):
    """There are 192 matrices: a rank has one of the largest, or none."""
    text = plan(MUON_ON_1024)
    said = " ".join(text.split())
    assert "192 matrices with 1.47B parameters are Muon's, with 8 bytes of optimizer state" in said
    assert "the one that owns most has 7.11 times the mean" in said
    largest, matrices = 4 * 1600**2, 48 * 12 * 1600**2
    others = presets.model("gpt2-xl").psi - matrices
    assert cells(text, "= model states")[3] == f"{(12 * largest + 16 * others / 1024) / 1e9:.3f}"
    assert cells(text, "optimizer state")[0] == f"{(8 * matrices + 12 * others) / 1e9:.1f}"


@pytest.mark.parametrize("name", ["zero-80b", "zero-100b", "zero-170b"])
def test_muon_takes_models_whose_size_is_rounded_down(plan, name):
    """The matrices of zero-100b have 100.66B parameters."""
    matrices = 12 * presets.model(name).layers * presets.model(name).hidden ** 2
    assert matrices > presets.model(name).psi
    text = plan(f"--model {name} --gpus 64 --gpu T4 --optimizer muon")
    assert cells(text, "optimizer state")[0] == memory.format_bytes(8 * matrices).removesuffix(" GB")


def test_the_largest_matrix_is_named_where_its_owner_has_no_room(plan):
    words = "--model gpt3-175b --gpus 1024 --gpu-memory 7GB --batch 1 --seq 16 --optimizer muon"
    text = " ".join(plan(f"{words} --checkpointing").split())
    assert "Does not fit at stage 3: every GPU keeps 0 GB of states whole" in text
    assert "and the owner of the largest matrix 7.25 GB more beside" in text


def test_the_number_of_gpus_that_muon_takes_is_the_first_that_fits(plan):
    """With 30 GPUs the mean fits, and the largest of the 48 matrices' shares does not."""
    words = "--model gpt2 --gpu-memory 60MB --optimizer muon --batch 1 --seq 64 --checkpointing --gpus"
    gpus = int(re.search(r"With (\d+) GPUs stage 3 fits", plan(f"{words} 1"))[1])
    assert gpus == 36
    assert [cells(plan(f"{words} {n}"), "fits")[3] for n in (gpus - 1, gpus)] == ["NO", "yes"]


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 50), max_size=12), ranks=st.integers(1, 9))
def test_the_largest_share_is_that_of_the_longest_first(sizes, ranks):
    """As Graham's rule says it, rank by rank."""
    loads = [0] * ranks
    for size in sorted(sizes, reverse=True):
        loads[loads.index(min(loads))] += size
    expected = max(loads) / sum(sizes) if sum(sizes) else 1 / ranks
    assert memory.largest_share(sizes, ranks) == pytest.approx(expected)
