"""Lesson 06's drawing, as measured: which units are whole at each moment of a step, and how many bytes."""

from typing import NamedTuple

from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from zerolab.course.look import CATEGORY_COLOURS, INK

AWAY, ARRIVING, WHOLE = range(3)
_COLOURS = ListedColormap(["#F0F0F0", "#BFDBEE", CATEGORY_COLOURS["params"]])


class Moment(NamedTuple):
    """One look at all units: what was computing, and each unit's state and bytes of whole parameters."""

    label: str
    states: list[int]
    nbytes: list[int]


def residency(figure: Figure, measured: dict[int, list[Moment]], names: list[str], prefetch: int = 1) -> str:
    """A row for each unit, a column for each look: whole, being gathered, or away; below, the bytes."""
    moments = measured[prefetch]
    grid = figure.add_axes((0.11, 0.42, 0.87, 0.46))
    states = [list(row) for row in zip(*(moment.states for moment in moments), strict=True)]
    grid.pcolormesh(states, cmap=_COLOURS, vmin=AWAY, vmax=WHOLE, edgecolors="white", linewidth=3)
    grid.set(xlim=(0, len(moments)), ylim=(len(names), 0), xticks=[])
    grid.set_yticks([row + 0.5 for row in range(len(names))], names)
    grid.tick_params(length=0)
    grid.spines[["left", "bottom"]].set_visible(False)
    totals = [sum(moment.nbytes) / 1e6 for moment in moments]
    _draw_bytes(figure, moments, totals, max(sum(m.nbytes) for run in measured.values() for m in run) / 1e6)
    _draw_key(figure)
    highest = max(sum(state != AWAY for state in moment.states) for moment in moments) - 1
    return (
        f"Which of the units {', '.join(names)} are whole while each block computes, with "
        f"prefetch={prefetch}. At most {highest} of the blocks are whole or arriving at once, beside the "
        f"root; at most {max(totals):.2f} MB of whole parameters."
    )


def _draw_bytes(figure: Figure, moments: list[Moment], totals: list[float], tallest: float) -> None:
    axes = figure.add_axes((0.11, 0.14, 0.87, 0.24))
    axes.bar(
        [column + 0.5 for column in range(len(moments))], totals, width=0.9, color=CATEGORY_COLOURS["params"]
    )
    axes.axhline(max(totals), color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.text(
        len(moments),
        max(totals),
        f"peak {max(totals):.2f} MB",
        ha="right",
        va="bottom",
        weight="bold",
        fontsize=9,
    )
    axes.set(xlim=(0, len(moments)), ylim=(0, tallest * 1.3), ylabel="MB")
    axes.set_xticks(
        [column + 0.5 for column in range(len(moments))], [moment.label.split()[1] for moment in moments]
    )
    axes.tick_params(axis="x", length=0)
    forward = sum(moment.label.startswith("forward") for moment in moments)
    for start, stop, phase in (
        (0, forward, "forward of block"),
        (forward, len(moments), "backward of block"),
    ):
        place = axes.get_position().x0 + axes.get_position().width * (start + stop) / 2 / len(moments)
        figure.text(place, 0.02, phase, ha="center", va="bottom")


def _draw_key(figure: Figure) -> None:
    for left, word, colour in (
        (0.11, "whole", CATEGORY_COLOURS["params"]),
        (0.24, "being gathered", "#6FA8D0"),
    ):
        figure.text(left, 0.93, f"■ {word}", color=colour, weight="bold")
    figure.text(0.45, 0.93, "■ away (only the own shard is here)", color="#999999", weight="bold")
