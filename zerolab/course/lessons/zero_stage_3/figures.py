"""Lesson 06's drawing, as measured: which units are whole at each moment of a step, and how many bytes."""

from typing import NamedTuple

from zerolab.course.look import CATEGORY_COLOURS
from zerolab.course.sketch import Sketch, nice

MB = 1e6
FREED, ARRIVING, WHOLE = range(3)
_COLOURS = ("#F0F0F0", "#BFDBEE", CATEGORY_COLOURS["params"])


class Moment(NamedTuple):
    """One look at all units: what was computing, and each unit's state and bytes of whole parameters."""

    label: str
    states: list[int]
    nbytes: list[int]


def residency(sketch: Sketch, measured: dict[int, list[Moment]], names: list[str], prefetch: int = 1) -> str:
    """A row for each unit, a column for each look: whole, being gathered, or freed; below, the bytes."""
    moments = measured[prefetch]
    grid = sketch.panel(0.11, 0.42, 0.87, 0.46, x=(0, len(moments)), y=(len(names), 0))
    for column, moment in enumerate(moments):
        for row, state in enumerate(moment.states):
            grid.rect(column, row, 1, 1, _COLOURS[state], edge="white", line=3)
    grid.y_axis({row + 0.5: name for row, name in enumerate(names)}, line=False)
    totals = [sum(moment.nbytes) / MB for moment in moments]
    _draw_bytes(sketch, moments, totals, max(sum(m.nbytes) for run in measured.values() for m in run) / MB)
    whole, freed = ("whole", _COLOURS[WHOLE]), ("freed (only this rank's shard is here)", "#777777")
    sketch.key(0.94, {0.11: whole, 0.24: ("being gathered", "#3E7FAE"), 0.45: freed})
    highest = max(sum(state != FREED for state in moment.states) for moment in moments) - 1
    return (
        f"Which of the units {', '.join(names)} are whole while each block computes, with "
        f"prefetch={prefetch}. Besides the root at most {highest} of the blocks are whole or being "
        f"gathered; at most {max(totals):.2f} MB of whole parameters."
    )


def _draw_bytes(sketch: Sketch, moments: list[Moment], totals: list[float], tallest: float) -> None:
    count, peak = len(moments), max(totals)
    bars = sketch.panel(0.11, 0.14, 0.87, 0.24, x=(0, count), y=(0, tallest * 1.3))
    for column, total in enumerate(totals):
        bars.rect(column + 0.05, 0, 0.9, total, CATEGORY_COLOURS["params"])
    bars.line([(0, peak), (count, peak)], width=0.8, dash="4 3")
    bars.text(count, peak, f"peak {peak:.2f} MB", align="right", vertical="bottom", bold=True, size=9)
    bars.x_axis({c + 0.5: moment.label.split()[1] for c, moment in enumerate(moments)}, marks=False)
    bars.y_axis(nice(0, tallest * 1.3, 3), "MB")
    forward = sum(moment.label.startswith("forward") for moment in moments)
    for start, stop, phase in ((0, forward, "forward of block"), (forward, count, "backward of block")):
        bars.text((start + stop) / 2, 0, phase, align="middle", vertical="top", shift=(0, 22))
