"""Promise: a value is drawn where its axis says, with its name, and words stay words."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from support.lessons import SVG

from zerolab.course.look import paint
from zerolab.course.sketch import Sketch, nice, powers_of_ten


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
