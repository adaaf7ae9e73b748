"""Lesson 05's drawings of measured numbers: gradients held during backward, and what accumulation costs."""

from itertools import groupby, pairwise
from typing import NamedTuple

from zerolab.course.look import CATEGORY_COLOURS
from zerolab.course.sketch import Panel, Sketch, nice

MB = 1e6
GREY, ORANGE = "#999999", CATEGORY_COLOURS["grads"]
Held = list[tuple[str, float]]
"""For each event the name of the parameter whose gradient was complete, and the bytes of gradients held."""


class Cost(NamedTuple):
    """What one step cost: the bytes moved in the paper's count, and the most gradient bytes held at once."""

    traffic_bytes: float
    peak_bytes: float


WAYS = ("stage 1, no_sync", "stage 2", "stage 2, no_sync")


def gradients_over_time(sketch: Sketch, stage_1: Held, stage_2: dict[int, Held], in_flight: int = 1) -> str:
    """Bytes of gradients held after each event of one backward pass, at stage 1 and at stage 2."""
    two, last = stage_2[in_flight], len(stage_1) - 1
    tallest, peak, kept = max(n for _, n in stage_1) / MB, max(n for _, n in two) / MB, two[-1][1] / MB
    plot = sketch.panel(0.09, 0.24, 0.89, 0.6, x=(0, last), y=(0, tallest * 1.12))
    _mark_units(plot, [name for name, _ in stage_1], tallest * 1.12)
    steps = _steps(two)
    plot.line([(0, 0), *steps, (last, 0)], colour="none", fill=ORANGE, opacity=0.3)
    plot.line(_steps(stage_1), colour=GREY, width=2)
    plot.line(steps, colour=ORANGE, width=2)
    plot.y_axis(nice(0, tallest * 1.12, 6), "MB of gradients held")
    sketch.text(0.09, 0.94, f"stage 1: up to {tallest:.2f} MB, and all stay", colour="#666666", bold=True)
    label = f"stage 2: up to {peak:.2f} MB, then {kept:.2f} MB stay"
    sketch.text(0.5, 0.94, label, colour="#A86F00", bold=True)
    return (
        f"Bytes of gradients held during one backward pass. Stage 1 grows to {tallest:.2f} MB and stays "
        f"there. Stage 2 with reduces_in_flight={in_flight} grows and falls with every unit, never above "
        f"{peak:.2f} MB, and ends at {kept:.2f} MB."
    )


def _steps(held: Held) -> list[tuple[float, float]]:
    """The corners of a line that keeps each value until the next event."""
    levels = [nbytes / MB for _, nbytes in held]
    corners = [(0.0, levels[0])]
    for event, (before, after) in enumerate(pairwise(levels), start=1):
        corners += [(event, before), (event, after)]
    return corners


def _mark_units(plot: Panel, names: list[str], top: float) -> None:
    """Name the stretches of the time axis that belong to one unit, with lines between them."""
    owners = [".".join(name.split(".")[:2]) if name.startswith("blocks.") else "root" for name in names]
    ticks, first = {}, 0
    for owner, events in groupby(owners):
        stop = first + len(list(events))
        ticks[(first + min(stop, len(names) - 1)) / 2] = owner.replace("blocks.", "block\n")
        if stop < len(names):
            plot.line([(stop, 0), (stop, top)], colour="#DDDDDD", width=0.8)
        first = stop
    plot.x_axis(ticks, "one step to the right: one more gradient is complete", size=8.5, marks=False)


def accumulation(
    sketch: Sketch, measured: dict[tuple[str, int], Cost], psi: int, micro_batches: int = 4
) -> str:
    """Traffic and peak gradient memory of one step with several micro-batches, three ways side by side."""
    most = max(m for _, m in measured)
    in_psi = {
        key: (cost.traffic_bytes / (4 * psi), cost.peak_bytes / (4 * psi)) for key, cost in measured.items()
    }
    panels = (
        (0.2, WAYS, "moved", in_psi[WAYS[1], most][0], "moved in one step, in units of Ψ"),
        (0.64, ("", "", ""), "held", 1, "most gradients held, in units of Ψ"),
    )
    spoken = []
    for which, (left, names, verb, widest, title) in enumerate(panels):
        bars = sketch.panel(left, 0.2, 0.33, 0.58, x=(0, widest * 1.22), y=(2.5, -0.5))
        for row, way in enumerate(WAYS):
            value = in_psi[way, micro_batches][which]
            bars.rect(0, row - 0.3, value, 0.6, ORANGE if row else GREY)
            words = f"{value:.2f} Ψ" if value % 1 else f"{value:.0f} Ψ"
            bars.text(value, row, words, bold=True, shift=(4, 0))
            spoken.append(f"{way}: {value:.2f} Ψ {verb}")
        bars.y_axis(dict(enumerate(names)))
        bars.x_axis(nice(0, widest * 1.22, 6), title)
    title = f"One step of {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
    sketch.text(0.01, 0.97, title, bold=True, vertical="top")
    extra = in_psi[WAYS[1], micro_batches][0] - in_psi[WAYS[0], micro_batches][0]
    more = f"stage 2 moves {extra:.0f} Ψ more than stage 1, or keeps gradients whole under no_sync"
    advice = more if extra > 0.5 else "one micro-batch: stage 2 moves what stage 1 moves"
    sketch.text(0.01, 0.87, f"({advice})", vertical="top", size=9)
    return f"{title}. {'; '.join(spoken)}."
