"""Promise: benchmarks/published.py fits one number for each model, and foretells the other rows with it."""

import importlib.util
import sys
from dataclasses import replace

import pytest
from support import ROOT

SPEC = importlib.util.spec_from_file_location("published", ROOT / "benchmarks/published.py")
published = importlib.util.module_from_spec(SPEC)
sys.modules["published"] = published
SPEC.loader.exec_module(published)

SLOW = published.Cluster("a slow link between nodes", 1e12, 1e12, 8, 300e9, 1e9)


def row(gpus: int, throughput: float, cluster=SLOW) -> "published.Row":
    return published.Row(cluster, "small", 64, 2, 2, gpus, 1, throughput)


def test_the_first_row_is_fitted_and_the_others_are_foretold():
    """Inside a node messages are hidden. Between nodes they are not, and the throughput is lower."""
    first, second = published.foretell([row(8, 100_000.0), row(16, 100_000.0)])
    assert first.fitted and first.throughput == pytest.approx(100_000, rel=1e-3)
    assert not second.fitted and second.share == first.share
    assert second.throughput < 0.9 * first.throughput
    assert second.error == pytest.approx(second.throughput / 100_000 - 1)


def test_every_model_has_a_share_of_its_own():
    other = row(8, 10_000.0)._replace(model="another")
    found = list(published.foretell([row(8, 100_000.0), other]))
    assert all(each.fitted for each in found)
    assert found[1].share < 0.2 * found[0].share


def test_the_table_has_a_line_for_each_row():
    lines = published.table([row(8, 100_000.0), row(16, 90_000.0)]).splitlines()
    assert lines[2] == "a slow link between nodes: tokens a second and GPU"
    assert "fitted" in lines[3] and lines[4].split()[:4] == ["small", "16", "1", "90,000"]


def test_the_published_models_have_the_parameters_that_they_are_said_to_have():
    said = {"350m": 355_985_408, "3b": 2_651_837_440, "13b": 12_853_954_560}  # one embedding, of both ends
    for each in (row for row in published.ROWS if not row.of_zero):
        embedding = (published.VOCABULARY + published.TOKENS) * each.width
        assert 12 * each.depth * each.width**2 + embedding == pytest.approx(said[each.model], rel=1e-3)


def test_runs_of_the_zero_paper_are_at_stage_2_with_tensor_parallelism_and_in_its_unit():
    """The paper's four runs; and a small one, where a link that is half as fast leaves fewer operations."""
    runs = [row for row in published.ROWS if row.of_zero]
    assert [(row.gpus, row.sequences) for row in runs] == [(64, 16), (128, 48), (256, 48), (400, 64)]
    assert all(12 * row.depth * row.width**2 == pytest.approx(60e9, rel=0.01) for row in runs)
    small = published.Row(published.V100, "small", 256, 2, 16, 32, 1, 20.0, of_zero=True)
    recording = published.recorded(small)
    ranks = {len(message.event.ranks) for message in recording.messages}
    assert ranks == {16, 2} and small.unit == "10^12 operations"
    slow = small._replace(cluster=replace(small.cluster, inside_bytes_per_second=1e9))
    fast_one, slow_one = (published.throughput(row, recording, 1.0) for row in (small, slow))
    assert 0 < slow_one < 0.5 * fast_one < 125
