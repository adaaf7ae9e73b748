"""Promise: a value is drawn where its axis says, and every lesson's drawing is sound SVG in every state."""

import re
from functools import partial
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from torch import nn

from zerolab.course.figures import (
    data_parallel,
    losses,
    memory,
    ranks,
    ring,
    zero_stage_1,
    zero_stage_2,
    zero_stage_3,
)
from zerolab.course.look import paint
from zerolab.course.sketch import Sketch, nice, powers_of_ten
from zerolab.memory import model_states

SVG = "{http://www.w3.org/2000/svg}"
LAYERS = nn.Sequential(nn.Linear(6, 20), nn.Linear(20, 4))


def ring_rounds(size: int) -> ring.Rounds:
    """The order of a ring all-reduce: chunk `rank - 1` leaves first, as `zerolab.ring` sends it."""
    return [
        [(step, (rank - 1 - step) % size, (rank - 2 - step) % size, 8) for step in range(2 * (size - 1))]
        for rank in range(size)
    ]


PHASES = ("forward", "backward")
NAMES = [f"blocks.{block}.weight" for block in (1, 0)] + ["embedding"]
HELD = {
    "stage_1": [(name, 1e6 * (place + 1)) for place, name in enumerate(NAMES)],
    "stage_2": {n: [(name, 5e5 * n) for name in NAMES] for n in (1, 2)},
}
COSTS = {(way, n): zero_stage_2.Cost(4e3 * (n + 1), 3e3) for way in zero_stage_2.WAYS for n in range(1, 9)}
MOMENTS = {
    n: [
        zero_stage_3.Moment(f"{phase} {block}", [2, n, 2], [10, 10 * n, 10])
        for phase in PHASES
        for block in (0, 1)
    ]
    for n in (0, 1)
}
EVENTS = [
    ("gradient", "1.weight"),
    ("start", "1"),
    ("gradient", "0.bias"),
    ("end", "1"),
    ("start", "0"),
    ("end", "0"),
]
STATES = [
    *(
        (memory.stage_bars, {"model": model, "gpus": gpus, "stage": stage, "precision": precision})
        for model in (1.5e9, 1e12)
        for gpus in (1, 1024)
        for stage in (0, 3)
        for precision in ("mixed", "fp32")
    ),
    *((memory.states_and_activations, {"batch": n, "checkpointing": c}) for n in (1, 64) for c in (0, 1)),
    *(
        (data_parallel.buckets, {"bucket_MB": mb, "gpus": n})
        for mb in data_parallel.BUCKET_MB
        for n in (2, 256)
    ),
    *((partial(zero_stage_1.partition_map, layer=LAYERS), {"ranks": n}) for n in range(1, 9)),
    *(
        (partial(ring.ring_step, recorded={n: ring_rounds(n)}), {"ranks": n, "step": step})
        for n in (2, 5)
        for step in range(2 * n)
    ),
    *((zero_stage_2.gradients_over_time, {**HELD, "in_flight": n}) for n in (1, 2)),
    *((partial(zero_stage_2.accumulation, measured=COSTS, psi=1000), {"micro_batches": n}) for n in (1, 8)),
    *(
        (partial(zero_stage_3.residency, measured=MOMENTS, names=["0", "1", "root"]), {"prefetch": n})
        for n in (0, 1)
    ),
    (data_parallel.timeline, {"runs": {"one after the other": EVENTS, "side by side": EVENTS}}),
    (data_parallel.held_by_rank, {"memories": [model_states(1, 4, stage) for stage in (0, 3)], "psi": 1}),
    (memory.sixteen_bytes, {}),
    (memory.per_gpu_curves, {}),
    (zero_stage_1.seam, {}),
    (ranks.separate_memories, {}),
    (ranks.drift, {"alone": [0.1, 0.4, 0.2], "averaged": [0.0, 0.0, 0.0]}),
    (losses.both_losses, {"sharded": [3.0, 2.5, 2.75], "single": [3.0, 2.5, 2.75], "stage": 1}),
]


@pytest.mark.parametrize(("draw", "values"), STATES)
def test_every_drawing_is_sound_and_stays_on_the_page(draw, values):
    svg, alt = paint(draw, 3.4, values)
    root = ElementTree.fromstring(svg)  # well-formed, whatever the words
    assert root.get("aria-label") == alt
    assert not re.search(r'"-?(nan|inf)', svg)
    _, _, width, height = map(float, root.get("viewBox").split())
    for text in root.iter(f"{SVG}text"):
        x, y = map(float, re.match(r"translate\(([-\d.]+) ([-\d.]+)\)", text.get("transform")).groups())
        assert 0 <= x <= width and 0 <= y <= height, "".join(text.itertext())
    for box in list(root.iter(f"{SVG}rect"))[1:]:
        if box.get("width").endswith("%") or "patternUnits" in box.attrib or box.get("x") is None:
            continue
        left, wide = float(box.get("x")), float(box.get("width"))
        assert left >= -1 and left + wide <= width + 1


def test_a_value_lies_where_its_axis_says():
    sketch = Sketch(height=1)
    plain = sketch.panel(0.5, 0, 0.5, 1, x=(0, 10), y=(4, 0))
    assert plain.at(0, 0) == pytest.approx((sketch.width / 2, 0)), "this y axis runs downwards"
    assert plain.at(5, 4) == pytest.approx((sketch.width * 0.75, 72))
    log = sketch.panel(0, 0, 1, 1, x=(1, 100), y=(0.1, 1000), log=True)
    assert log.at(10, 10) == pytest.approx((sketch.width / 2, 36))


def test_a_tick_stands_at_its_value_with_its_name():
    sketch = Sketch(height=2)
    panel = sketch.panel(0.1, 0.2, 0.8, 0.7, x=(0, 8), y=(0, 1))
    panel.x_axis({6: "six"})
    ElementTree.fromstring(sketch.svg("an axis"))
    (word,) = [element for element in sketch.elements if "six" in element]
    assert f"translate({panel.at(6, 0)[0]:.2f} " in word


@pytest.mark.parametrize(("low", "high"), [(0, 139.2), (0, 18560), (0, 0.7), (2.9, 5.6), (-1, 1), (0, 1.09)])
def test_ticks_are_round_evenly_spaced_and_within_the_axis(low, high):
    ticks = nice(low, high)
    steps = {round(b - a, 9) for a, b in pairwise(ticks)}
    assert len(steps) == 1 and 3 <= len(ticks) <= 9 and low <= ticks[0] and ticks[-1] <= high
    assert f"{steps.pop():e}"[0] in "125"


def test_ticks_are_written_with_the_same_decimals():
    sketch = Sketch(height=2)
    sketch.panel(0.1, 0.1, 0.8, 0.8, x=(0, 1), y=(2, 3.2)).y_axis(nice(2, 3, 4))
    assert re.findall(r">([\d.]+)</tspan>", "".join(sketch.elements)) == [
        "2.00",
        "2.25",
        "2.50",
        "2.75",
        "3.00",
    ]


def test_a_logarithmic_axis_has_powers_of_ten():
    assert powers_of_ten(0.08, 1500) == {0.1: "0.1", 1: "1", 10: "10", 100: "100", 1000: "1,000"}


def test_words_with_signs_of_markup_stay_words():
    svg, _ = paint(lambda sketch: sketch.text(0.5, 0.5, "a < b & c\nsecond") or 'says "<" & more', 1, {})
    root = ElementTree.fromstring(svg)
    assert [span.text for span in root.iter(f"{SVG}tspan")] == ["a < b & c", "second"]
    assert root.get("aria-label") == 'says "<" & more'


def test_thousands_of_messages_become_few_bars_that_cover_the_same_time():
    sent = data_parallel.send_buckets(1, 64)
    bars = data_parallel._merged(sent, sent[-1][1] / 600)
    assert len(sent) == 3000 and len(bars) <= 600
    assert bars[0][0] == sent[0][0] and bars[-1][1] == sent[-1][1]
