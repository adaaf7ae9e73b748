"""Promise: a plan counts tensor parallelism, ZeRO-R and offload, and refuses what does not go together."""

import re

import pytest
from support import plans
from support.plans import cells

from zerolab import cost, memory, residual
from zerolab.__main__ import main

OF_100B = "--model zero-100b --gpus 400 --gpu V100-32GB"
WHOLE = 2 * 50257 * 8192
RANK_PSI = (100e9 - WHOLE) / 16 + WHOLE
ADDED = [
    "activation checkpoints",
    "one block (estimate)",
    "checkpoints on the CPU",
    "optimizer state on the CPU",
    "optimizer state on disk",
    "GB out of it and in, a step",
    "GB sent within the copy",
    "seconds of computation",
    "of ZeRO's messages",
    "of messages within the copy",
    "of moving out and in",
    "= a step",
    "TFLOP/s of each GPU",
]


@pytest.fixture
def plan(capsys):
    return lambda words: plans.ask(words) or capsys.readouterr().out


def rows_added(text: str) -> list[str]:
    return [label for label in ADDED if any(line.startswith(label) for line in text.splitlines())]


def printed(values) -> list[str]:
    return [memory.format_bytes(value).removesuffix(" GB") for value in values]


def test_the_states_are_those_of_a_part(plan):
    text = plan(f"{OF_100B} --tensor-parallel 16 --checkpointing")
    states = [memory.model_states(RANK_PSI, 25, stage) for stage in range(4)]
    for label, name in {
        "parameters": "params_bytes",
        "gradients": "grads_bytes",
        "optimizer state": "optimizer_bytes",
        "= model states": "total_bytes",
    }.items():
        assert cells(text, label) == printed(getattr(each, name) for each in states)
    assert cells(text, "= model states") == ["112", "31.5", "18.0", "4.49"]
    assert cells(text, "activation checkpoints") == ["67.1"] * 4
    assert cells(text, "one block (estimate)") == ["6.44"] * 4
    assert cells(text, "= total")[2] == memory.format_bytes(states[2].total_bytes + 67.11e9 + 6.44e9)[:4]
    assert "25 copies of the model, 16 GPUs each: 7.02B parameters on a GPU, 823M of them whole" in text
    assert "batch of 32 x 1024 tokens on each copy (--batch, --seq), a checkpoint of each block" in text
    assert rows_added(text) == ["activation checkpoints", "one block (estimate)", "GB sent within the copy"]


def test_partitioned_checkpoints_imply_checkpointing(plan):
    text = plan(f"{OF_100B} --tensor-parallel 16 --partition-activations")
    assert cells(text, "activation checkpoints") == ["4.19"] * 4
    assert cells(text, "fits") == ["NO", "NO", "yes", "yes"]
    assert "a checkpoint of each block, partitioned" in text
    assert rows_added(text) == ["activation checkpoints", "one block (estimate)", "GB sent within the copy"]


def test_a_plan_that_does_not_fit_names_the_flag_that_helps(plan):
    advice = plan(f"{OF_100B} --tensor-parallel 16")
    assert "With --partition-activations activations take 10.6 GB instead of 805 GB, and stage 2" in advice
    fits = "--model zero-60b --gpus 64 --gpu V100-32GB --tensor-parallel 16"
    assert "With --checkpointing activations take" in plan(f"{fits} --batch 4")
    tight = "--model zero-170b --gpus 400 --gpu V100-32GB --tensor-parallel 16 --batch 80"
    assert "With --partition-activations --cpu-checkpointing activations take" in plan(tight)


def test_checkpoints_on_the_cpu(plan):
    text = plan(
        f"{OF_100B} --tensor-parallel 16 --partition-activations --cpu-checkpointing --micro-batches 3"
    )
    assert cells(text, "activation checkpoints") == ["0"] * 4
    assert cells(text, "checkpoints on the CPU") == ["4.19"] * 4
    assert cells(text, "GB out of it and in, a step") == ["12.6"] * 4  # 4.19 in each micro-batch
    assert "Not counted either: what is on its way in or out" in text


def test_checkpoints_go_to_the_cpu_without_tensor_parallelism_too(plan):
    text = plan("--model gpt2-xl --gpus 64 --gpu-memory 32GB --checkpointing --cpu-checkpointing")
    assert cells(text, "checkpoints on the CPU") == printed([48 * 32 * 1024 * 1600 * 2] * 4)
    assert cells(text, "one block (estimate)") == printed([12 * 32 * 1024 * 1600 * 2] * 4)
    assert "tokens on each GPU (--batch, --seq), a checkpoint of each block, on the CPU" in text


@pytest.mark.parametrize(("place", "words"), [("cpu", "on the CPU"), ("disk", "on disk")])
def test_the_optimizer_state_is_elsewhere(plan, place, words):
    ask = f"--model gpt2-xl --gpus 64 --gpu-memory 32GB --checkpointing --offload-optimizer {place}"
    text, psi = plan(ask), 1_557_611_200
    assert cells(text, "optimizer state  ") == ["0"] * 4
    held = [12 * psi / (64 if stage else 1) for stage in range(4)]
    assert cells(text, f"optimizer state {words}") == printed(held)
    assert cells(text, "GB out of it and in, a step") == printed(held)
    assert cells(text, "= model states") == printed([4 * psi, 4 * psi, (2 + 2 / 64) * psi, 4 / 64 * psi])
    assert rows_added(text) == [f"optimizer state {words}", "GB out of it and in, a step"]
    assert f"optimizer state kept {words}" in text
    assert cells(text, "largest model, states alone") == ["8.00B", "8.00B", "15.8B", "512B"]
    larger = plan(f"{ask} --optimizer sgd")
    assert cells(larger, "largest model, states alone") == ["8.00B", "8.00B", "15.8B", "512B"]


def test_traffic_within_the_copy(plan):
    words = "--model zero-60b --gpus 64 --gpu V100-32GB --tensor-parallel 16 --batch 2"
    for flags, factor in {"": 8, "--checkpointing": 10, "--partition-activations": 11}.items():
        for micro_batches in (1, 3):
            text = plan(f"{words} {flags} --micro-batches {micro_batches}")
            payload = micro_batches * factor * 132 * 2 * 1024 * 6144 * 2
            sent = cost.wire_bytes(payload, 16, "all_gather")
            assert cells(text, "GB sent within the copy") == printed([sent] * 4)
    part = residual.rank_psi(60e9, 16, 2 * 50257 * 6144)
    assert cells(plan(words), "GB each GPU sends per step") == printed(
        cost.communication_volume(part, stage) * 2 * 3 / 4 for stage in range(4)
    )


def test_the_largest_model_and_the_gpus_needed_are_of_whole_copies(plan):
    words = "--model zero-60b --gpu V100-32GB --tensor-parallel 16 --partition-activations --batch 8"
    text = plan(f"{words} --gpus 16")
    gpus = int(re.search(r"it takes (\d+) GPUs", text)[1])
    assert gpus % 16 == 0
    fits = lambda n: cells(plan(f"{words} --gpus {n}"), "fits")
    stages = re.search(r"Does not fit at stage ([\d, ]+): it takes", text)[1].split(", ")
    for stage in map(int, stages):
        assert (fits(gpus - 16)[stage], fits(gpus)[stage]) == ("NO", "yes")
    (largest,) = {cells(plan(f"{words} --gpus 128"), "largest model, states alone")[2]}
    part = residual.rank_psi(memory.parse_count(largest), 16, 2 * 50257 * 6144)
    assert memory.model_states(part, 8, 2).total_bytes == pytest.approx(32e9, rel=0.005)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_largest_batch_fits_and_one_more_does_not(plan, stage):
    words = f"{OF_100B} --tensor-parallel 16 --partition-activations --offload-optimizer cpu"
    batch = int(cells(plan(words), "largest batch that fits")[stage])
    assert batch > 1
    answers = [cells(plan(f"{words} --batch {each}"), "fits")[stage] for each in (batch, batch + 1)]
    assert answers == ["yes", "NO"]


SPEEDS = "--tflops 45 --link 12.5GB"


def test_seconds_add_up(plan):
    words = f"{OF_100B} --tensor-parallel 16 --partition-activations --offload-optimizer disk --latency 0"
    text = plan(f"{words} {SPEEDS} --tensor-parallel-link 150GB --offload-link 12GB")
    parts = ADDED[ADDED.index("seconds of computation") : ADDED.index("= a step")]
    table = {label: [float(cell) for cell in cells(text, label)] for label in ADDED if "second" in label}
    table |= {label: [float(cell) for cell in cells(text, label)] for label in (*parts, "= a step")}
    for stage in range(4):
        total = sum(table[label][stage] for label in parts)
        assert table["= a step"][stage] == pytest.approx(total, rel=0.01)
    computed = 8 * RANK_PSI * 32 * 1024 / 45e12  # each computes the head
    assert table["seconds of computation"] == pytest.approx([computed] * 4, rel=0.01)
    moved = [2 * 12 * RANK_PSI / (25 if stage else 1) / 12e9 for stage in range(4)]
    assert table["of moving out and in"] == pytest.approx(moved, rel=0.01)
    within = 11 * 125 * 32 * 1024 * 8192 * 2 * 15 / 16 / 150e9
    assert table["of messages within the copy"] == pytest.approx([within] * 4, rel=0.01)
    passes = [2, 2, 2, 3]
    sent = [each * 2 * RANK_PSI * 24 / 25 / 12.5e9 for each in passes]
    assert table["of ZeRO's messages"] == pytest.approx(sent, rel=0.01)
    speed = [computed / total * 45 for total in table["= a step"]]
    assert [float(cell) for cell in cells(text, "TFLOP/s of each GPU")] == pytest.approx(speed, rel=0.01)
    said = " ".join(text.split())
    assert "seconds assume 45 TFLOP/s on a GPU, 12.5 GB/s between copies, 150 GB/s within a copy" in said
    assert "12.0 GB/s out of the GPU and in, 0 s a message, 8 FLOPs per parameter and token" in said


def test_seconds_have_rows_for_what_takes_any(plan):
    alone = plan("--psi 1B --gpus 1 --gpu T4 --tflops 10 --batch 1")
    assert rows_added(alone) == ["seconds of computation", "= a step", "TFLOP/s of each GPU"]
    assert cells(alone, "seconds of computation") == ["0.614"] * 4
    assert "6 FLOPs per parameter and token" in alone
    within = plan(
        "--model zero-13b --gpus 4 --gpu T4 --tensor-parallel 4 --tflops 10 --tensor-parallel-link 1GB"
    )
    assert "of messages within the copy" in rows_added(within)
    assert "of ZeRO's messages" not in rows_added(within)


def test_a_link_within_the_copy_is_by_default_the_one_between_copies(plan):
    words = f"{OF_100B} --tensor-parallel 16 {SPEEDS}"
    assert plan(words) == plan(f"{words} --tensor-parallel-link 12.5GB")


@pytest.mark.parametrize(
    "words", ["--model gpt2-xl --gpus 64 --gpu-memory 32GB --checkpointing", "--psi 7.5B --gpus 8 --gpu T4"]
)
def test_without_the_flags_nothing_is_added(plan, words):
    text = plan(words)
    assert rows_added(text) == []
    assert "cop" not in text
    assert plan(f"{words} --tensor-parallel 1") == text


def test_a_bare_size_is_cut_whole(plan):
    text = plan("--psi 16B --gpus 64 --gpu V100-32GB --tensor-parallel 16")
    assert cells(text, "= model states") == printed(
        memory.model_states(1e9, 4, stage).total_bytes for stage in range(4)
    )
    said = " ".join(text.split())
    assert "1.00B parameters on a GPU, all of them cut, because the model's layers are not known" in said


@pytest.mark.parametrize("more", ["", "--partition-activations --cpu-checkpointing --offload-optimizer cpu"])
def test_a_plan_is_at_most_100_columns_wide(plan, more):
    speeds = f"{SPEEDS} --offload-link 12GB"
    assert max(map(len, plan(f"{OF_100B} --tensor-parallel 16 {more} {speeds}").splitlines())) <= 100


TINY = "--psi 7B --gpus 4 --gpu T4"
REFUSED = {
    f"{OF_100B} --partition-activations": "--partition-activations shares checkpoints among GPUs that have",
    f"{OF_100B} --partition-activations --tensor-parallel 1": "--partition-activations shares checkpoints",
    f"{OF_100B} --cpu-checkpointing": "--cpu-checkpointing moves checkpoints, and there are none; add --ch",
    f"{OF_100B} --tensor-parallel 16 --cpu-checkpointing": "--cpu-checkpointing moves checkpoints, and",
    f"{OF_100B} --tensor-parallel 0": "--tensor-parallel is 0; it must be 1 or more",
    f"{OF_100B} --tensor-parallel 3": "--tensor-parallel is 3, which does not divide --gpus, 400; take a div",
    f"{OF_100B} --tensor-parallel 5": "--tensor-parallel is 5, which does not divide the attention heads of "
    "zero-100b, 64; take a divisor of 64",
    "--model zero-1.5b --gpus 6 --gpu T4 --tensor-parallel 3": "--tensor-parallel is 3, which does not "
    "divide the width of zero-1.5b, 1600",
    f"{OF_100B} --offload-optimizer ram": "--offload-optimizer is ram; write cpu or disk",
    f"{TINY} --tensor-parallel 2 --partition-activations": "the layers of a model are not known, so neither "
    "are its checkpoints; take a --model",
    f"{TINY} --checkpointing --cpu-checkpointing": "the layers of a model are not known, so neither",
    f"{TINY} --tensor-parallel 2 {SPEEDS}": "the layers of a model are not known, so neither are its mess",
    f"{TINY} --link 12.5GB": "--link is for the seconds of a step; add --tflops",
    f"{TINY} --latency 0": "--latency is for the seconds of a step; add --tflops",
    f"{TINY} --tflops 45": "--tflops asks for seconds, which need --link too; add it, as in --link 12.5GB",
    f"{TINY} {SPEEDS} --offload-optimizer cpu": "--tflops asks for seconds, which need --offload-link too",
    f"{TINY} --tflops 0 --link 1GB": "--tflops is 0; it must be above 0",
    f"{TINY} --tflops nan --link 1GB": "--tflops is nan; it must be above 0",
    f"{TINY} --tflops 4 --link 12": "--link is 12, which is 12 bytes a second; write a unit",
    f"{TINY} --tflops 4 --link 1GB --latency -1": "--latency is -1; it must be from 0 to 1000 seconds",
}


@pytest.mark.parametrize("words", REFUSED)
def test_the_command_refuses_in_one_line(capsys, words):
    assert main(["plan", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"zerolab plan: {REFUSED[words]}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("gpus", "tensor_parallel", "named"),
    [(1, 1, ""), (2, 1, ", 50.0 GB/s between copies"), (2, 2, ", 150 GB/s within a copy")],
)
def test_the_speeds_that_are_assumed_are_those_of_links_that_are_used(plan, gpus, tensor_parallel, named):
    words = f"--model gpt2-medium --gpus {gpus} --tensor-parallel {tensor_parallel} --gpu V100-32GB --batch 1"
    said = " ".join(plan(f"{words} --tflops 45 --link 50GB --tensor-parallel-link 150GB").split())
    assert f"seconds assume 45 TFLOP/s on a GPU{named}, 1e-05 s a message" in said
