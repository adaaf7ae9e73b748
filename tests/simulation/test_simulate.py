"""Promise: a simulated step has the order, the bytes and the operations of the engine's own step."""

import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import ROOT

from zerolab import models, rehearsal
from zerolab.events import Event
from zerolab.simulation import Alone, Cluster, play, play_turn, record, simulate
from zerolab.simulation.recording import Message, Operator, Place, Recorder, Recording, seconds_of_parts

TOKENS = 64
build = partial(models.GPT, vocab=256, width=64, depth=4, heads=2, context=TOKENS)
ONE = Cluster("one of everything", 1, 1, 8, 1, 1, latency_seconds=0)
FREE = Cluster("links that take no time", 1e12, 1e11, 8, 1e24, 1e24, latency_seconds=0)
TWO_SPEEDS = Cluster("two speeds", 1, 1, 8, 20, 10, latency_seconds=0.5, inside_latency_seconds=0.25)
SLOW = Cluster("links that take all the time", 1e12, 1e11, 8, 1e3, 1e3, latency_seconds=0)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.zeros(1, TOKENS, dtype=torch.long),) * 2


def by_hand(*places: tuple[int, str, int], seconds: list[int], ranks: tuple = (0, 1)) -> Recording:
    """Two equal steps. Places: how many operators stand before, a message, and its bytes or 0 to wait.

    The last operator is the update.
    """
    operators = [Operator(each, 0) for each in seconds] * 2
    begins, updates, messages, order = [], [], [], 0
    for step in range(2):
        begins.append(Place(order := order + 1, step * len(seconds)))
        updates.append(Place(order := order + 1, (step + 1) * len(seconds) - 1))
        started = {}
        for before, name, nbytes in places:
            place = Place(order := order + 1, step * len(seconds) + before)
            if nbytes:
                event = Event("all_gather", name, "forward", step, nbytes, nbytes, "", (), (), "", 0.0)
                event.ranks = ranks
                started[name] = Message(event, place, [])
            else:
                started[name].waits.append(place)
        messages += started.values()
    return Recording(operators, messages, [*begins, Place(order + 1, 2 * len(seconds))], updates)


def test_a_message_is_hidden_behind_what_is_computed_before_its_wait():
    """3 s of computation, and from the first second on a message of 2 s beside it."""
    step = play(by_hand((1, "a", 2), (2, "a", 0), seconds=[1, 1, 1]), ONE, 2)
    assert (step.seconds, step.computation_seconds, step.message_seconds) == (4, 3, 2)
    assert step.exposed_seconds == 1
    assert play(by_hand((1, "a", 2), (3, "a", 0), seconds=[1, 1, 1]), ONE, 2).seconds == 3


def test_messages_run_one_after_the_other():
    """Two messages of 2 s, started at once: the second is over after 4 s."""
    step = play(by_hand((0, "a", 2), (0, "b", 2), (1, "a", 0), (2, "b", 0), seconds=[1, 1]), ONE, 2)
    assert (step.seconds, step.exposed_seconds) == (4, 2)


def test_a_step_waits_for_what_the_step_before_has_started():
    """A message of 3 s is started at the end of each step of 1 s, and waited for at the end of the next."""
    step = by_hand((1, "a", 3), seconds=[1])
    first = step.messages[0]
    recording = step._replace(messages=[first._replace(waits=[step.begins[-1]._replace(order=99)])])
    assert play(recording._replace(begins=[*step.begins[:-1], Place(100, 2)]), ONE, 2).seconds == 3


def test_a_turn_begins_and_ends_without_messages():
    """A message of 3 s is started at the end of a step of 1 s, and waited for at the end of the next."""
    step = by_hand((1, "a", 3), seconds=[1])
    later = [place._replace(order=place.order + 0.5) for place in step.begins[1:]]
    waited = [each._replace(waits=[end]) for each, end in zip(step.messages, later, strict=True)]
    recording = step._replace(messages=waited)
    assert play_turn(recording, ONE) == 1 + 3


SHARED = replace(ONE, processor_seconds_per_byte=0.5)


def test_a_message_takes_its_share_of_the_processor_that_computes():
    """From the second second on a message of 2 s takes half of it: 1 + 2 · 1/2 s are computed in 3 s."""
    recording = by_hand((1, "a", 2), (3, "a", 0), seconds=[1, 1, 1])
    assert (play(recording, ONE, 2).seconds, play(recording, SHARED, 2).seconds) == (3, 4)
    late = by_hand((2, "a", 2), (2, "a", 0), seconds=[1, 1, 1])
    assert play(late, SHARED, 2).seconds == 5, "the GPU waits for it and computes nothing meanwhile"


def test_a_message_that_ends_within_an_operator_slows_only_a_part_of_it():
    """Each operator has half of its speed for the 2 s of a message, and then all of it."""
    recording = by_hand((0, "a", 2), (1, "b", 2), seconds=[2, 4])
    assert play(recording, SHARED, 2).seconds == (2 + 1) + (2 + 3)


def test_a_processor_slower_than_the_link_decides_how_long_a_message_takes():
    assert replace(ONE, processor_seconds_per_byte=2).sending("all_gather", 3, (0, 1)) == (12, 0.5)
    assert SHARED.sending("all_gather", 3, (0, 1)) == (3, 0.5)
    assert ONE.sending("all_gather", 3, (0, 1)) == (3, 0)


def test_an_operator_takes_its_arithmetic_or_its_memory_whichever_is_longer():
    assert ONE.operator_seconds(3, 2) == 3
    assert ONE.operator_seconds(2, 3) == 3


def test_what_an_operator_computes_and_moves_is_noted_and_nothing_else():
    """A product, a sum in place, and no views, no allocations, no messages."""
    with rehearsal._fake_world(2), Recorder() as recorder:
        left, right = (torch.empty(shape, device="meta") for shape in ((2, 3), (3, 4)))
        product = left.view(6).view(2, 3) @ right
        product.detach().add_(1)
        dist.all_reduce(torch.empty_like(product))
    assert recorder.operators == [Operator(2 * 2 * 3 * 4, 4 * (6 + 12 + 8)), Operator(0, 4 * (8 + 8))]


@pytest.mark.parametrize(
    ("op", "ranks", "seconds"),
    [
        ("all_gather", range(8), 7 * 0.25 + 100 / 20),
        ("all_reduce", range(8), 2 * 7 * 0.25 + 100 / 20),
        ("all_gather", range(8, 16), 7 * 0.25 + 100 / 20),
        ("reduce_scatter", range(16), 0.5 + 14 * 0.25 + 100 / 10),
        ("reduce_scatter", range(4, 12), 0.5 + 6 * 0.25 + 100 / (10 * 4 / 8)),
        ("all_reduce", range(3, 67, 8), 2 * 7 * 0.5 + 100 / (10 / 8)),
        ("all_gather", range(0, 16, 2), 0.5 + 6 * 0.25 + 100 / (10 * 4 / 8)),
    ],
)
def test_a_ring_takes_the_latency_of_its_links_and_the_slowest_one(op: str, ranks: range, seconds: float):
    """Groups of 4 ranks a node share its network with one other group, those of 1 rank with seven."""
    assert TWO_SPEEDS.message_seconds(op, 100, ranks) == seconds


@pytest.mark.parametrize(
    ("op", "ranks", "seconds"),
    [
        ("all_gather", range(8), 0.5 + 100 / 20),
        ("all_reduce", range(8), 2 * 0.5 + 100 / 20),
        ("all_gather", range(16), 0.5 + 100 * 8 / 15 / (10 / 8)),
        ("all_reduce", range(3, 67, 8), 2 * 0.5 + 100 / (10 / 8)),
    ],
)
def test_what_is_sent_directly_waits_for_the_latency_once_and_leaves_its_node_rank_by_rank(
    op: str, ranks: range, seconds: float
):
    direct = replace(TWO_SPEEDS, direct=True)
    assert direct.message_seconds(op, 100, ranks) == pytest.approx(seconds)


def test_messages_inside_a_node_and_between_nodes_run_beside_each_other():
    """A message of 2 s between two nodes, and one of 2 s inside a node, both started at once."""
    step = by_hand((0, "a", 2), (0, "b", 2), (1, "a", 0), (1, "b", 0), seconds=[1, 1])
    assert play(step, ONE, 16).seconds == 5
    for message in step.messages[::2]:
        message.event.ranks = (0, 8)
    assert play(step, replace(ONE, between_bytes_per_second=8), 16).seconds == 3


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_the_bytes_are_those_of_a_rehearsal(stage: int, tensor_parallel: int):
    recording = record(build, 8, stage, inputs=tokens, tensor_parallel=tensor_parallel)
    rehearsed = rehearsal.rehearse(build, 8, stage, inputs=tokens, tensor_parallel=tensor_parallel)
    copy, copies = tuple(range(tensor_parallel)), tuple(range(0, 8, tensor_parallel))
    sent = {copy: 0, copies: 0}
    for message in recording.messages:
        sent[message.event.ranks] += message.event.wire_bytes * (message.event.step == 1)
    assert sent[copies] == rehearsed.traffic.wire_bytes
    if tensor_parallel > 1:
        assert sent[copy] == rehearsed.tensor_parallel_traffic.wire_bytes


def test_hybrid_sharding_sends_a_share_of_the_gradients_between_nodes_and_the_rest_inside():
    step = record(build, 16, 3, inputs=tokens, shard_size=8)
    sent: dict[tuple[int, ...], int] = {}
    for message in step.messages:
        event = message.event
        sent[event.ranks] = sent.get(event.ranks, 0) + event.wire_bytes * (event.step == 1)
    assert sent.keys() == {tuple(range(8)), (0, 8)}
    rehearsed = rehearsal.rehearse(build, 16, 3, inputs=tokens, shard_size=8).traffic
    assert sent[0, 8] == rehearsed.by_op["all_reduce"].wire_bytes
    assert sum(sent.values()) == rehearsed.wire_bytes


def test_the_reduction_between_nodes_runs_beside_backward():
    """Without it the computation waits for every one; with it, for those of the last units."""
    cluster = Cluster("nodes", 1e11, 1e11, 8, 1e24, 8e8, latency_seconds=0)
    waited, beside = (
        simulate(build, 16, 3, cluster, inputs=tokens, shard_size=8, reduces_in_flight=number)
        for number in (0, 1)
    )
    assert waited.exposed_seconds == pytest.approx(waited.message_seconds, rel=0.01)
    assert beside.exposed_seconds < 0.6 * beside.message_seconds


@pytest.mark.parametrize("stage", [0, 3])
def test_the_operations_are_six_a_parameter_and_token_and_those_of_attention(stage: int):
    step = simulate(build, 8, stage, FREE, inputs=tokens)
    matrices = 4 * 12 * 64**2 + 256 * 64  # the blocks' and the head's
    attention = 4 * 2 * 2 * 64 * TOKENS**2  # by layer: q·k and the weighted sum, of all heads together
    assert step.flops == pytest.approx(6 * matrices * TOKENS + 3 * attention, rel=0.05)


@pytest.mark.parametrize("stage", range(4))
def test_free_links_leave_the_computation_and_slow_ones_the_messages(stage: int):
    free, slow = (simulate(build, 8, stage, each, inputs=tokens) for each in (FREE, SLOW))
    assert free.seconds == pytest.approx(free.computation_seconds)
    assert free.exposed_seconds == pytest.approx(0, abs=1e-9)
    assert slow.seconds == pytest.approx(slow.message_seconds, rel=0.01)


def test_prefetch_hides_gathers_as_the_engine_does():
    """With a link about as fast as the computation, a gather ahead of its use hides more of what it takes."""
    link = Cluster("a link", 1e11, 1e11, 8, 1e9, 1e9, latency_seconds=0)
    at_use, ahead = (simulate(build, 8, 3, link, inputs=tokens, prefetch=n) for n in (0, 1))
    assert at_use.message_seconds == pytest.approx(ahead.message_seconds)
    assert ahead.exposed_seconds < 0.9 * at_use.exposed_seconds


def test_a_measured_computation_replaces_the_model_of_it():
    """A rank of two updates half of the parameters, in half of the time."""
    alone = Alone(record(build, 1, 0, inputs=tokens), passes_seconds=7.0, update_seconds=2.0)
    step = lambda stage: play(record(build, 2, stage, inputs=tokens), FREE, 2, alone)
    assert step(0).computation_seconds == pytest.approx(9.0, rel=0.02)
    assert step(1).computation_seconds == step(1).seconds == pytest.approx(8.0, rel=0.02)


def test_the_update_is_told_from_the_passes():
    recording = by_hand(seconds=[3, 2, 1])
    assert [[each.flops for each in part] for part in recording.parts()] == [[3, 2], [1]] * 2
    assert seconds_of_parts(recording, ONE) == (5, 1)


def test_the_totals_follow_from_the_seconds():
    cluster = Cluster("priced", 1e12, 1e11, 8, 1e9, 1e9, dollars_per_gpu_hour=2.0)
    step = simulate(build, 16, 2, cluster, inputs=tokens)
    assert step.tflops == step.flops / step.seconds / 1e12
    assert step.tokens_per_day(TOKENS) == 86_400 / step.seconds * TOKENS * 16
    assert step.dollars(3600 / step.seconds) == pytest.approx(2.0 * 16)


def test_ranks_that_share_a_copy_share_its_tokens():
    step = simulate(build, 16, 2, FREE, inputs=tokens, tensor_parallel=2)
    assert step.tokens_per_day(TOKENS) == 86_400 / step.seconds * TOKENS * 8


REFUSED = {
    "tokens is -1; it must be a whole number": lambda step: step.tokens_per_day(-1),
    "steps is nan; it must be a finite number": lambda step: step.dollars(math.nan),
    "steps is 0; it must be a whole number": lambda step: simulate(build, 2, 2, FREE, steps=0),
    "cluster is a str: pass a zerolab.Cluster": lambda step: simulate(build, 2, 2, "dgx"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_arguments_are_named(message: str):
    step = play(by_hand((1, "a", 2), (2, "a", 0), seconds=[1, 1, 1]), ONE, 2)
    with pytest.raises((TypeError, ValueError), match=message):
        REFUSED[message](step)


def test_more_ranks_cost_no_memory_and_little_time():
    few, many = (record(build, n, 3, inputs=tokens) for n in (8, 16_384))
    assert len(few.operators) == len(many.operators)
    assert len(few.messages) == len(many.messages)


def test_the_timeline_is_the_one_of_perfetto(tmp_path: Path):
    step = simulate(build, 8, 3, FREE, inputs=tokens)
    step.save(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"compute", "all_gather blocks.0", "reduce_scatter blocks.3"} <= names
    computed = sum(event["dur"] for event in events if event["name"] == "compute")
    assert computed == pytest.approx(1e6 * step.computation_seconds, rel=0.02)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"flops_per_second": 0}, "flops_per_second is 0; it must be above 0"),
        ({"between_bytes_per_second": -1}, "between_bytes_per_second is -1; it must be a finite number"),
        ({"gpus_per_node": 0}, "gpus_per_node is 0; it must be a whole number from 1"),
        ({"latency_seconds": float("nan")}, "latency_seconds is nan"),
        ({"dollars_per_gpu_hour": "2"}, "dollars_per_gpu_hour is '2', of type str"),
    ],
)
def test_a_wrong_number_of_a_cluster_is_named(changed: dict, complaint: str):
    right = vars(SimpleNamespace(name="x", flops_per_second=1, memory_bytes_per_second=1, gpus_per_node=8,
                                 inside_bytes_per_second=1, between_bytes_per_second=1))  # fmt: skip
    with pytest.raises((ValueError, TypeError), match=re.escape(complaint)):
        Cluster(**right | changed)


def test_the_guide_runs(capsys):
    """Stage 3 sends half as much again as stages 1 and 2, and with these links it hides nearly all of it."""
    text = (ROOT / "docs/how_long.md").read_text("utf-8")
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], {})
    printed = capsys.readouterr().out
    seconds = [float(each) for each in re.findall(r"stage \d: ([\d.]+) s", printed)]
    assert len(seconds) == 4
    assert seconds[1] <= seconds[3] < 1.1 * seconds[1]


def test_bad_sizes_are_named_as_by_rehearse():
    with pytest.raises(ValueError, match="world_size is 0: pass a whole number of 1 or more"):
        simulate(build, 0, 3, FREE)
