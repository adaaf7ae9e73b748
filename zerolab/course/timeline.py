"""Draw a step in time from `trace.timeline()`: for each rank a lane of work and one of messages."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from matplotlib.axes import Axes

from zerolab.course import look

COLOURS = {
    "forward": "#C8C8C8",
    "backward": "#8C8C8C",
    "update": look.COLOURS["optimizer state"],
    "reduce": look.COLOURS["gradients"],
    "gather": look.COLOURS["parameters"],
}
"""By what an event does: the colour of what it changes or sends."""
_KINDS = {"reduce_scatter": "reduce", "all_reduce": "reduce", "all_gather": "gather"}


class Bar(NamedTuple):
    """Something that took time: ``lane`` 0 is the rank's own work, the others are messages under way."""

    kind: str
    lane: int
    start_ms: float
    ms: float


def last_step(events: Sequence[dict]) -> list[Bar]:
    """Return what a rank's timeline has of its last whole step on the CPU, in order of time for each lane.

    Raises: ValueError where the timeline has fewer than two steps.
    """
    titles = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    events = [event for event in events if "GPU" not in titles.get(event["tid"], "")]
    phases = [event for event in events if event["ph"] == "X" and event["tid"] == 0 and "args" not in event]
    ends = [after["ts"] for phase, after in pairwise(phases) if phase["name"] == "step"]
    if len(ends) < 2:
        raise ValueError(f"the timeline has {len(ends)} whole steps, and 2 are needed: train one more step")
    begin, end = ends[-2:]
    # After backward the engine is ready for the next forward, but none is computed before the step.
    idle = [phase for phase, after in pairwise(phases) if after["name"] == "step"]
    bars = []
    for event in events:
        word = event["name"].split()[0]
        kind = _KINDS.get(word, word)
        if kind in COLOURS and event not in idle and begin <= event["ts"] < end:
            bars.append(Bar(kind, event["tid"], event["ts"] / 1e3, event["dur"] / 1e3))
    return bars


def draw(axes: Axes, ranks: Sequence[Sequence[dict]]) -> None:
    """Draw the last step of each rank: its work above, its messages below, as many lanes as are under way.

    The figure's first axes get the legend.
    """
    steps = [last_step(events) for events in ranks]
    origin = min(bar.start_ms for bars in steps for bar in bars)
    lanes = max(bar.lane for bars in steps for bar in bars)
    if axes.figure.axes[0] is axes:
        for kind, colour in COLOURS.items():
            axes.barh(0, 0, color=colour, label=kind)
    for rank, bars in enumerate(steps):
        for bar in bars:
            top, height = (-0.4, 0.38) if bar.lane == 0 else (0.42 * (bar.lane - 1) / lanes, 0.42 / lanes)
            place = rank + top + height / 2
            axes.barh(place, bar.ms, height, left=bar.start_ms - origin, color=COLOURS[bar.kind])
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
    axes.set_ylim(len(ranks) - 0.5, -0.5)
