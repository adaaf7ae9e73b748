"""Lesson 05's drawings of measured numbers: gradients held during backward, and what accumulation costs."""

from itertools import pairwise
from typing import NamedTuple

from zerolab.course.look import CATEGORY_COLOURS
from zerolab.course.sketch import Panel, Sketch, nice

MB = 1e6
GREY, ORANGE = "#999999", CATEGORY_COLOURS["grads"]
Held = list[tuple[str, float]]
"""What a census found each time a parameter's gradient was complete: its name, bytes of gradients."""


class Cost(NamedTuple):
    """What one step cost: bytes in and out in the paper's count, and the most gradient bytes held at once."""

    traffic_bytes: float
    peak_bytes: float


WAYS = ("stage 1, no_sync", "stage 2", "stage 2, no_sync")


def gradients_over_time(sketch: Sketch, stage_1: Held, stage_2: dict[int, Held], in_flight: int = 1) -> str:
    """Bytes of gradients held after each event of one backward pass, at stage 1 and at stage 2."""
    tallest = max(held for _, held in stage_1)
    two, last = stage_2[in_flight], len(stage_1) - 1
    plot = sketch.panel(0.09, 0.24, 0.89, 0.6, x=(0, last), y=(0, tallest / MB * 1.12))
    _mark_units(plot, [name for name, _ in stage_1], tallest / MB * 1.12)
    saw = _stairs(two)
    plot.line([(0, 0), *saw, (last, 0)], colour="none", fill=ORANGE, opacity=0.3)
    plot.line(_stairs(stage_1), colour=GREY, width=2)
    plot.line(saw, colour=ORANGE, width=2)
    plot.y_axis(nice(0, tallest / MB * 1.12, 6), "MB of gradients held")
    peak, kept = max(held for _, held in two), two[-1][1]
    one = f"stage 1: up to {tallest / MB:.2f} MB, and it stays"
    sketch.text(0.09, 0.94, one, colour="#666666", bold=True)
    label = f"stage 2: up to {peak / MB:.2f} MB, then {kept / MB:.2f} MB stay"
    sketch.text(0.5, 0.94, label, colour="#A86F00", bold=True)
    return (
        f"Bytes of gradients held during one backward pass. Stage 1 climbs in stairs to {tallest / MB:.2f} "
        f"MB and stays there. Stage 2 with reduces_in_flight={in_flight} climbs and falls with every unit, "
        f"never above {peak / MB:.2f} MB, and ends at {kept / MB:.2f} MB."
    )


def _stairs(held: Held) -> list[tuple[float, float]]:
    """The corners of a line that keeps each value until the next event."""
    levels = [nbytes / MB for _, nbytes in held]
    corners = [(0.0, levels[0])]
    for event, (before, after) in enumerate(pairwise(levels), start=1):
        corners += [(event, before), (event, after)]
    return corners


def _mark_units(plot: Panel, names: list[str], top: float) -> None:
    """The stretches of the time axis that belong to one unit, in the order in which gradients came."""
    owners = [".".join(name.split(".")[:2]) if name.startswith("blocks.") else "root" for name in names]
    ticks, first = {}, 0
    for place in range(1, len(owners) + 1):
        if place == len(owners) or owners[place] != owners[first]:
            ticks[(first + min(place, len(owners) - 1)) / 2] = owners[first].replace("blocks.", "block\n")
            if place < len(owners):
                plot.line([(place, 0), (place, top)], colour="#DDDDDD", width=0.8)
            first = place
    plot.x_axis(
        ticks, "one step to the right: one more parameter's gradient is complete", size=8.5, marks=False
    )


def accumulation(
    sketch: Sketch, measured: dict[tuple[str, int], Cost], psi: int, micro_batches: int = 4
) -> str:
    """Traffic and peak gradient memory of one step with several micro-batches, three ways side by side."""
    most = max(m for _, m in measured)
    panels = (
        (0.2, "traffic_bytes", "moved in one step, in units of Ψ", measured[WAYS[1], most].traffic_bytes),
        (0.64, "peak_bytes", "most gradients held, in units of Ψ", 4 * psi),
    )
    spoken = []
    for left, field, title, widest in panels:
        end = widest / (4 * psi) * 1.22
        bars = sketch.panel(left, 0.2, 0.33, 0.58, x=(0, end), y=(2.5, -0.5))
        for row, way in enumerate(WAYS):
            value = getattr(measured[way, micro_batches], field) / (4 * psi)
            bars.rect(0, row - 0.3, value, 0.6, ORANGE if row else GREY)
            words = f"{value:.2f} Ψ" if value % 1 else f"{value:.0f} Ψ"
            bars.text(value, row, words, bold=True, shift=(4, 0))
            spoken.append(f"{way}: {value:.2f} Ψ {'moved' if left < 0.5 else 'held'}")
        bars.y_axis(dict(enumerate(WAYS if left < 0.5 else ("", "", ""))))
        bars.x_axis(nice(0, end, 6), title)
    title = f"One step of {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
    sketch.text(0.01, 0.97, title, bold=True, vertical="top")
    sketch.text(0.01, 0.87, f"({_advice(measured, psi, micro_batches)})", vertical="top", size=9)
    return f"{title}. {'; '.join(spoken)}."


def _advice(measured: dict[tuple[str, int], Cost], psi: int, micro_batches: int) -> str:
    extra = (
        measured[WAYS[1], micro_batches].traffic_bytes - measured[WAYS[0], micro_batches].traffic_bytes
    ) / (4 * psi)
    if extra < 0.5:
        return "one micro-batch: stage 2 moves what stage 1 moves"
    return f"stage 2 moves {extra:.0f} Ψ more than stage 1, or keeps gradients whole under no_sync"
