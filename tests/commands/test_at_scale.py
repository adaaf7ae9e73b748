"""Promise: benchmarks/at_scale.py simulates every way that fits, and marks the fastest."""

import importlib.util
import sys
from dataclasses import replace

import pytest
from support import ROOT

from zerolab.simulation import play, record

SPEC = importlib.util.spec_from_file_location("at_scale", ROOT / "benchmarks/at_scale.py")
at_scale = importlib.util.module_from_spec(SPEC)
sys.modules["at_scale"] = at_scale
SPEC.loader.exec_module(at_scale)

SMALL = at_scale.Shape("small", 256, 9, 8)
FEW = tuple(replace(each, between_bytes_per_second=5e8) for each in at_scale.CLUSTERS[:1])


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setattr(at_scale, "SEQUENCES", {16: 16})
    monkeypatch.setattr(at_scale, "VOCABULARY", 512)


@pytest.mark.parametrize(
    ("kind", "stage", "tensor_parallel", "shard_size"),
    [(at_scale.STAGES_1_2, 1, 1, None), ("stage 3", 3, 2, None), ("hybrid", 3, 1, 8)],
)
def test_the_seconds_of_all_blocks_follow_from_those_of_a_few(kind, stage, tensor_parallel, shard_size):
    way = at_scale.Way(SMALL, 16, kind, stage, tensor_parallel, shard_size)
    whole = play(record(**at_scale.options(way, SMALL.depth)), FEW[0], 16)
    assert at_scale.seconds(way, FEW) == [pytest.approx(whole.seconds, rel=1e-9)]


def test_ways_that_do_not_fit_are_left_out_and_hybrid_groups_are_the_smallest_that_fit(monkeypatch):
    large = at_scale.Shape("large", 8192, 60, 64)
    monkeypatch.setattr(at_scale, "SEQUENCES", {64: 64})
    found = list(at_scale.ways(large, 64))
    assert found and all(way.needed_bytes <= at_scale.GPU_BYTES for way in found)
    (hybrid,) = (way for way in found if (way.kind, way.tensor_parallel) == ("hybrid", 1))
    assert hybrid.shard_size > 8 and hybrid._replace(shard_size=8).needed_bytes > at_scale.GPU_BYTES
    assert 1 not in {way.stage for way in found if way.tensor_parallel == 1}


def test_the_table_has_a_line_for_each_model_and_a_star_at_the_fastest(monkeypatch):
    monkeypatch.setattr(at_scale, "CLUSTERS", at_scale.CLUSTERS[:1])
    times = {at_scale.STAGES_1_2: 3.0, "stage 3": 2.0, "hybrid": 4.0}
    run = lambda _, every: [[times[way.kind] + way.tensor_parallel] for way in every]
    _, kinds, line, *_ = at_scale.table((SMALL,), (16,), run).splitlines()
    assert kinds.split() == ["GPUs", "stages", "1", "and", "2", "stage", "3", "hybrid"]
    assert line.split()[:2] == ["small", "16"] and line.count("*") == 1
    assert line.index("4.00 s") < line.index("3.00 s") < line.index("*") < line.index("5.00 s")


def test_control_messages_are_a_check_for_each_collective_and_a_few_rounds():
    """Of 9 blocks and the rest: a reduction, two gathers of each but one of the rest, and one agreement."""
    found = at_scale.control(at_scale.Way(SMALL, 16, "stage 3", 3, 1))
    collectives = 10 + 2 * 10 - 1
    assert found.messages == collectives + 1 + 4
    parameters = 9 * 12 + 5
    assert found.nbytes == at_scale.MESSAGE_BYTES * (collectives + 1) + 4 * (64 + parameters)
