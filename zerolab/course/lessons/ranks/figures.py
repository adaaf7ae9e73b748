"""Lesson 00's drawings: processes that share nothing, and models that nobody keeps in step."""

from collections.abc import Sequence

from zerolab.course.look import ink_on, rank_colour
from zerolab.course.sketch import FRAME, Sketch, nice


def separate_memories(sketch: Sketch, world_size: int = 4) -> str:
    """One box a process, each with its own x, and a line that carries only what is sent."""
    page = sketch.panel(0.01, 0.02, 0.98, 0.96, x=(-0.15, world_size - 0.05), y=(-0.08, 1.05))
    for rank in range(world_size):
        middle, colour = rank + 0.39, rank_colour(rank)
        page.rect(rank - 0.04, 0.31, 0.86, 0.68, "none", edge=FRAME, radius=5)
        page.text(middle, 0.86, f"rank {rank}", align="middle", bold=True)
        page.rect(middle - 0.2, 0.49, 0.4, 0.18, colour, radius=4)
        page.text(middle, 0.58, "its own x", align="middle", colour=ink_on(colour))
        page.line([(middle, 0.12), (middle, 0.31)], width=1.2)
    page.line([(0.39, 0.12), (world_size - 0.61, 0.12)], width=1.2)
    words = "messages: the only way from one to another"
    page.text(world_size / 2 - 0.11, 0.0, words, align="middle")
    return (
        f"{world_size} separate boxes, rank 0 to rank {world_size - 1}, each with its own copy of x; a line "
        "below joins them, labelled: messages, the only way from one to another."
    )


def drift(sketch: Sketch, alone: Sequence[float], averaged: Sequence[float]) -> str:
    """How far apart the weights of two ranks are, step by step, without and with averaged gradients."""
    last, highest = len(alone), max(alone) * 1.05
    plot = sketch.panel(0.1, 0.2, 0.6, 0.76, x=(1, last), y=(-0.05 * highest, highest))
    for series, rank, name in ((alone, 1, "each on its own"), (averaged, 0, "gradients averaged")):
        points = list(enumerate(series, start=1))
        plot.line(points, colour=rank_colour(rank), width=2)
        plot.marks(points, rank_colour(rank), size=0.75)
        words = f"{name}: {series[-1]:.2g}"
        plot.text(last, series[-1], words, colour=rank_colour(rank), bold=True, shift=(6, 0))
    plot.x_axis(range(2, last + 1, 2), "training step")
    plot.y_axis(nice(0, highest), "distance between\nthe two ranks' weights")
    return (
        f"Distance between the weights of two ranks over {len(alone)} steps: each on its own they part from "
        f"the first step; with averaged gradients the distance stays {averaged[-1]:g}."
    )
