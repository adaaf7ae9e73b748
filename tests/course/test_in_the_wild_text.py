"""Lesson 08: the numbers in its text are the code's, its names exist in torch, its drawings are sound."""

import re

import pytest
import torch
from support.explorers import explorers, move_sliders
from support.lessons import drawing, source, spoken
from torch.distributed.fsdp import FSDPModule, ShardingStrategy

import zerolab
from zerolab import cost, memory, presets
from zerolab.course.lessons.in_the_wild import clusters, quiz
from zerolab.course.lessons.in_the_wild.figures import topology

TEXT = re.sub(r"\s+", " ", source("in_the_wild").replace("\n# ", " "))


def said(*words: str) -> bool:
    return all(word in TEXT for word in words)


def test_the_names_in_the_table_are_torchs():
    for name in ("set_modules_to_forward_prefetch", "set_requires_gradient_sync", "set_requires_all_reduce"):
        assert said(name) and hasattr(FSDPModule, name)
    for name in ("SHARD_GRAD_OP", "FULL_SHARD", "NO_SHARD"):
        assert said(name) and hasattr(ShardingStrategy, name)
    assert said("ZeroRedundancyOptimizer", "gradient_as_bucket_view", "MixedPrecisionPolicy")


def test_every_table_has_its_pages():
    text = source("in_the_wild")
    used = set(re.findall(r"\]\[([a-z]\w*)\]", text))
    assert used == set(re.findall(r"^# \[(\w+)\]: http", text, re.M)) != set()


def test_the_numbers_of_the_largest_cluster():
    cluster = clusters.CLUSTERS["1,024 GPUs"]
    planned = clusters.question(cluster, "mixed", False).total_bytes(3)
    passing = clusters.passing_bytes(cluster.model, cluster.gpus, 3, "mixed")
    states = memory.model_states(cluster.shape.psi, 1024, 3).total_bytes
    block = 12 * cluster.shape.hidden**2
    assert said(
        f"are {states / 1e9:.1f} GB", f"{planned / 1e9:.1f} of 80 GB", f"are {passing / 1e9:.1f} GB more"
    )
    assert said(f"a unit has {block / 1e9:.1f} billion parameters")
    root = (2 * 50_257 + cluster.shape.seq) * cluster.shape.hidden
    matrix = 4 * cluster.shape.hidden**2
    assert 2 * (4 * block + 2 * root + matrix) == pytest.approx(passing, rel=0.01)
    assert said(
        f"4 × {2 * block / 1e9:.1f} GB", f"2 × {2 * root / 1e9:.1f} GB", f"is {2 * matrix / 1e9:.1f} GB"
    )
    assert said("450 GB/s over NVLink") and presets.machine("H100-80GB").link_bytes_per_second == 450e9
    ethernet = clusters.CLUSTERS["Ethernet"]
    assert said(f"Ψ more bytes at {ethernet.network_bytes_per_second / 1e9:.2f} GB/s")


def test_the_numbers_of_the_speed_up():
    one_gpu = drawing("in_the_wild", "one_gpu")
    (few, tau, first), (many, _, last) = one_gpu(64), one_gpu(400)
    assert said(f"τ = {tau:.2f} s", f"b = {few} and c = {first:.1f} s", f"b = {many} and c = {last:.1f} s")
    faster = 400 / 64 * (tau + first / few) / (tau + last / many)
    assert faster > 400 / 64 and quiz.speed_up(6.25).mistakes != {}
    alt = spoken(drawing("in_the_wild", "super_linear"), 3, Gbit=100)
    assert f"{faster:.2f} times as fast" in alt


def test_hybrid_sharding_moves_what_the_text_says():
    assert said("stage 2 has 9Ψ, and stage 3 has 24Ψ")
    assert [cost.communication_volume(1, stage, micro_batches=8) for stage in (1, 2, 3)] == [2, 9, 24]
    assert [cost.communication_volume(1, stage, micro_batches=16) for stage in (1, 3)] == [2, 48]
    seconds_on, on = drawing("in_the_wild", "seconds_on"), clusters.CLUSTERS["Ethernet"]
    three, hybrid = seconds_on(on, "stage 3", 8), seconds_on(on, "hybrid", 8)
    assert hybrid < three / 8 and seconds_on(on, "stage 1", 8) == seconds_on(on, "stage 1", 1)


def lasts(intervals) -> float:
    return sum(each.stop - each.start for each in intervals)


def test_what_the_simulated_steps_wait_for():
    simulated = drawing("in_the_wild", "simulated")
    step = simulated("stage 2", 100)
    computing = [each for each in step.intervals if each.computes]
    gathers, reductions = (
        [each for each in step.intervals if each.name.startswith(op)] for op in ("all_gather", "reduce_sc")
    )
    assert said(f"a step computes for {step.computation_seconds:.1f} seconds")
    assert said(f"under way for {step.message_seconds:.1f} seconds")
    assert said(f"gathers take {lasts(gathers):.1f} seconds", f"another {lasts(reductions):.1f} seconds")
    forward = 32 * lasts(computing[1:2])  # one block of 32; the head is small beside them
    backward = lasts(computing) - forward
    assert forward < lasts(gathers) and lasts(reductions) < backward
    assert said(f"{forward:.1f} in the forward pass and {backward:.1f} in the backward pass")
    mistakes, answer = quiz.WAITS.mistakes.values(), step.exposed_seconds
    rounded = [round(each, 1) for each in (lasts(gathers), forward, step.computation_seconds)]
    for hidden in (rounded[1], rounded[2] / 3):
        estimate = rounded[0] - hidden
        assert any(abs(estimate - known) < 0.01 for known in mistakes)
        assert abs(estimate - answer) > quiz.WAITS.tolerance * answer, "a named mistake is no right answer"
    hybrid = simulated("hybrid", 100)
    between = [each for each in hybrid.intervals if each.name.startswith("all_reduce")]
    assert {each.details["phase"] for each in between} == {"backward"}
    assert hybrid.exposed_seconds > 2 * step.exposed_seconds


def test_the_rate_from_which_the_choice_does_not_matter():
    simulated, engines = drawing("in_the_wild", "simulated"), ("stage 1", "stage 2", "stage 3", "hybrid")
    longest = {
        Gbit: max(simulated(engine, Gbit).exposed_seconds for engine in engines)
        for Gbit in (100, 200, 400, 800)
    }
    assert said("From 200 Gbit/s on, each of the four waits less than a tenth of a second")
    assert longest[800] <= longest[400] <= longest[200] < 0.1 < longest[100]
    for Gbit in (25, 800):
        alt = spoken(drawing("in_the_wild", "overlap"), 3, Gbit=Gbit)
        assert f"stage 3 {simulated('stage 3', Gbit).exposed_seconds:.2f}, hybrid" in alt


def test_the_log_is_of_a_block_of_this_lessons_model():
    with torch.device("meta"):
        block = drawing("in_the_wild", "fresh_model")().blocks[0]
    numel = sum(parameter.numel() for parameter in block.parameters())
    assert said(f"NumelIn={numel // 4}, NumelOut={numel},", f"{numel // 4:,} numbers become {numel:,}")


def test_the_accidents_are_told_apart():
    accident = drawing("in_the_wild", "accident")
    for kind, says in (
        ("one step less", "it waited for a message of rank 1, which had returned"),
        ("another path", "ranks took different paths"),
    ):
        with pytest.raises(zerolab.WorkerError, match=says):
            zerolab.launch(accident, 2, kind, timeout=60)
    with pytest.raises(zerolab.LaunchTimeout, match="rank 1 still ran code of its own"):
        zerolab.launch(accident, 2, "busy elsewhere", timeout=12)


# ---- the drawings


@pytest.mark.parametrize("micro_batches", [1, 16])
@pytest.mark.parametrize("nodes", [2, 32])
def test_the_networks_lines_are_within_the_axes(micro_batches: int, nodes: int):
    alt = spoken(drawing("in_the_wild", "network_matters"), 3, micro_batches=micro_batches, nodes=nodes)
    assert f"{nodes} nodes" in alt and "stage 3 " in alt


def test_the_sliders_find_every_choice_rehearsed(monkeypatch):
    assert clusters.rehearse_every_choice() == 6 * 4 * 3
    monkeypatch.setattr(clusters.rehearsal, "rehearse", lambda *_: pytest.fail("a slider would wait"))
    sizes_on = drawing("in_the_wild", "sizes_on")
    for cluster in clusters.CLUSTERS.values():
        for stage in range(4):
            sizes = [sizes_on(cluster, stage, each, False) for each in clusters.OFFERED_PRECISIONS]
            assert all(each["for a moment"] > 0 for each in sizes)


PRECISIONS = [(0, "mixed"), (1, "mixed"), (2, "mixed"), *((3, each) for each in clusters.OFFERED_PRECISIONS)]


@pytest.mark.parametrize(("stage", "precision"), PRECISIONS)
@pytest.mark.parametrize("name", clusters.CLUSTERS)
def test_what_passes_by_does_not_depend_on_the_number_of_layers(name: str, stage: int, precision: str):
    cluster = clusters.CLUSTERS[name]
    shape = clusters.shape_of(cluster.model)
    sizes = {"vocab": 50_257, "width": shape.hidden, "heads": shape.heads, "context": shape.seq}
    run = zerolab.rehearse(lambda: zerolab.models.GPT(depth=6, **sizes), cluster.gpus, stage, precision)
    passing = max(run.peak_by_phase.values()) - run.memory.total_bytes
    assert clusters.passing_bytes(cluster.model, cluster.gpus, stage, precision) == passing


@pytest.mark.parametrize("name", clusters.CLUSTERS)
@pytest.mark.parametrize("checkpointing", ["on", "off"])
def test_the_bar_of_a_cluster_says_what_the_check_judges(name: str, checkpointing: str):
    cluster = clusters.CLUSTERS[name]
    for stage in range(4):
        choice = {"cluster": name, "stage": stage, "precision": "mixed", "checkpointing": checkpointing}
        alt = spoken(drawing("in_the_wild", "on_a_cluster"), 2.4, **choice)
        needed = clusters.needed_bytes(cluster, stage, "mixed", checkpointing == "on")
        fits = clusters.fits(cluster, stage, "mixed", checkpointing == "on")
        assert f"{needed / 1e9:.1f} GB, {'fits' if fits else 'does not fit'} into" in alt


def test_the_bar_of_a_cluster_says_where_there_is_no_bf16():
    choice = {"cluster": "Kaggle", "stage": 1, "checkpointing": "off"}
    in_bf16, in_fp16 = (
        spoken(drawing("in_the_wild", "on_a_cluster"), 2.4, precision=precision, **choice)
        for precision in ("mixed", "mixed_fp16")
    )
    assert "a T4 has no bf16" in in_bf16 and "s compute" in in_fp16 and "bf16" not in in_fp16


def test_the_other_drawings():
    assert "shards 0 to 7" in spoken(topology, 3)
    for Gbit in (25, 800):
        assert "linear is 6.25" in spoken(drawing("in_the_wild", "super_linear"), 3, Gbit=Gbit)
        for price in (0.1, 20):
            alt = spoken(drawing("in_the_wild", "bill"), 2.8, price_per_GPU_hour=price, Gbit=Gbit)
            assert f"at {price:g} for an hour" in alt


def test_axes_stay_in_place_and_words_in_view_while_a_slider_moves():
    found = explorers("in_the_wild")
    assert len(found) == 5
    for explorer in found:
        move_sliders(explorer)
