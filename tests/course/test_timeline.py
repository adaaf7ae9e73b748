"""Promise: the picture of a step has its work and its messages, where and when the trace has them."""

import pytest
import torch
from matplotlib.figure import Figure
from support.lessons import solutions_travel_by_value

import zerolab
from zerolab.course import timeline
from zerolab.course.timeline import Bar, draw, last_step

solutions_travel_by_value(__name__)


def phase(name: str, start: float, stop: float) -> dict:
    return {"ph": "X", "name": name, "pid": 0, "tid": 0, "ts": start, "dur": stop - start}


def event(name: str, lane: int, start: float, stop: float) -> dict:
    return phase(name, start, stop) | {"tid": lane, "args": {}}


TWO_STEPS = [
    {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "rank 0: compute"}},
    phase("setup", 0, 1000),
    phase("forward", 1000, 2000),
    phase("step", 2000, 3000),
    phase("forward", 3000, 4000),
    phase("backward", 4000, 6000),
    phase("forward", 6000, 6500),
    phase("step", 6500, 9000),
    phase("forward", 9000, 9500),
    event("all_gather root", 1, 2500, 2900),
    event("reduce_scatter blocks.0", 2, 5000, 7000),
    event("exchange used parameters", 1, 6600, 6700),
    event("update root", 0, 7000, 8000),
    event("all_gather root", 1, 8000, 9000),
]


def test_the_last_step_has_its_work_and_its_messages():
    """Not the step before, not what comes after it, no control message, and no forward without a model."""
    assert last_step(TWO_STEPS) == [
        Bar("forward", 0, 3.0, 1.0),
        Bar("backward", 0, 4.0, 2.0),
        Bar("reduce", 2, 5.0, 2.0),
        Bar("update", 0, 7.0, 1.0),
        Bar("gather", 1, 8.0, 1.0),
    ]


def test_one_step_is_too_few():
    with pytest.raises(ValueError, match="has 1 whole steps, and 2 are needed: train one more"):
        last_step(TWO_STEPS[:6])


def test_messages_under_way_together_are_side_by_side():
    axes = Figure().subplots()
    draw(axes, [TWO_STEPS, TWO_STEPS])
    bars = [bar for bar in axes.patches if bar.get_width()]  # the others are the legend's
    first, second = bars[:5], bars[5:]
    assert [bar.get_x() for bar in first] == [0, 1, 2, 4, 5] == [bar.get_x() for bar in second]
    rows = [round(bar.get_y() + bar.get_height() / 2, 3) for bar in first]
    work, _, reduce, _, gather = rows
    assert rows.count(work) == 3 and work < gather < reduce
    assert first[4].get_height() == pytest.approx(reduce - gather)
    assert [round(bar.get_y() + bar.get_height() / 2 - 1, 3) for bar in second] == rows


def train(stage: int) -> list[dict]:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=stage)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.trace.timeline()


@pytest.mark.parametrize("stage, gathers", [(0, 0), (1, 3), (2, 3), (3, 6)])
def test_a_real_step_has_every_units_messages(stage: int, gathers: int):
    """At stage 3 each layer is gathered twice, for forward and for backward."""
    for events in zerolab.launch(train, 2, stage):
        kinds = [bar.kind for bar in last_step(events)]
        counted = {kind: kinds.count(kind) for kind in timeline.COLOURS}
        assert counted == {"forward": 1, "backward": 1, "update": 3, "reduce": 3, "gather": gathers}


def test_the_lanes_of_a_gpu_are_left_out():
    lane = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 100, "args": {"name": "rank 0: GPU compute"}}
    gpu = [lane, phase("backward", 4500, 6500) | {"tid": 100}, event("update root", 100, 7500, 8500)]
    assert last_step([*TWO_STEPS, *gpu]) == last_step(TWO_STEPS)


def test_the_first_picture_names_the_colours():
    figure = Figure()
    above, below = figure.subplots(2)
    for axes in (above, below):
        draw(axes, [TWO_STEPS])
    assert above.get_legend_handles_labels()[1] == list(timeline.COLOURS)
    assert below.get_legend_handles_labels()[1] == []
