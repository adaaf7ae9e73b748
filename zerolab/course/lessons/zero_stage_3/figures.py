"""Lesson 06's diagram, as measured: which units are whole at each moment of a step, and how many bytes."""

from typing import NamedTuple

from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zerolab.course.look import COLOURS, INK, PALE, PAPER

MB = 1e6
FREED, ARRIVING, WHOLE = range(3)
_COLOURS = {
    "freed (shard only)": PALE,
    "being gathered": "#8FC3E8",
    "whole": COLOURS["parameters"],
}


class Moment(NamedTuple):
    """One look at all units: what was computing, and each unit's state and bytes of whole parameters."""

    label: str
    states: list[int]
    nbytes: list[int]


def residency(fig: Figure, measured: dict[int, list[Moment]], names: list[str], prefetch: int = 1) -> str:
    """A row for each unit, a column for each look: whole, being gathered, or freed; below, the bytes."""
    moments = measured[prefetch]
    grid, bars = fig.subplots(2, height_ratios=[2, 1])
    states = list(zip(*(moment.states for moment in moments), strict=True))
    cells = {"cmap": ListedColormap(list(_COLOURS.values())), "vmin": 0, "vmax": 2}
    grid.pcolormesh(states, edgecolors=PAPER, linewidth=2, **cells)
    for name, colour in _COLOURS.items():
        grid.add_patch(Rectangle((0, 0), 0, 0, color=colour, label=name))
    grid.set(xlim=(0, len(moments)), ylim=(len(names), 0), xticks=[], yticks=[])
    for row, name in enumerate(names):  # not as ticks, which take longer to draw
        grid.text(-0.15, row + 0.5, name, ha="right", va="center")
    totals = [sum(moment.nbytes) / MB for moment in moments]
    bars.stairs(totals, fill=True, color=COLOURS["parameters"])
    bars.axhline(max(totals), color=INK, linestyle="--", linewidth=0.8)
    bars.text(0, max(totals), f"peak {max(totals):.2f} MB", va="bottom", weight="bold", size=9)
    tallest = max(sum(moment.nbytes) for run in measured.values() for moment in run) / MB
    bars.set(
        xlim=(0, len(moments)),
        ylim=(0, 1.3 * tallest),
        ylabel="MB whole",
        xlabel="the block that computes: forward, then backward",
    )
    ends = [0, len(moments) // 2 - 1, len(moments) // 2, len(moments) - 1]  # of both passes
    bars.set_xticks([end + 0.5 for end in ends], [moments[end].label.split()[1] for end in ends])
    highest = max(sum(state != FREED for state in moment.states) for moment in moments) - 1
    return (
        f"Which of the units {', '.join(names)} are whole while each block computes, with "
        f"prefetch={prefetch}. Besides the root at most {highest} of the blocks are whole or being "
        f"gathered; at most {max(totals):.2f} MB of whole parameters."
    )
