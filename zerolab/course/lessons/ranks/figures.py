"""Lesson 00's drawings: processes that share nothing, and models with and without averaged gradients."""

from collections.abc import Sequence

from zerolab.course.look import ink_on, rank_colour
from zerolab.course.sketch import FRAME, Sketch, nice


def separate_memories(sketch: Sketch, world_size: int = 4) -> str:
    """One box for each process, each with its own x, and a line for the messages."""
    page = sketch.panel(0.01, 0.02, 0.98, 0.96, x=(-0.15, world_size - 0.05), y=(-0.08, 1.05))
    for rank in range(world_size):
        middle, colour = rank + 0.39, rank_colour(rank)
        page.rect(rank - 0.04, 0.31, 0.86, 0.68, "none", edge=FRAME, radius=5)
        page.text(middle, 0.86, f"rank {rank}", align="middle", bold=True)
        page.rect(middle - 0.2, 0.49, 0.4, 0.18, colour, radius=4)
        page.text(middle, 0.58, "its own x", align="middle", colour=ink_on(colour))
        page.line([(middle, 0.12), (middle, 0.31)], width=1.2)
    page.line([(0.39, 0.12), (world_size - 0.61, 0.12)], width=1.2)
    words = "messages: the only connection between them"
    page.text(world_size / 2 - 0.11, 0.0, words, align="middle")
    boxes = f"{world_size} separate boxes, rank 0 to rank {world_size - 1}, each with its own copy of x"
    return f"{boxes}. A line below connects them: {words}."


def drift(sketch: Sketch, alone: Sequence[float], averaged: Sequence[float]) -> str:
    """The distance between the weights of two ranks after each step, without and with averaged gradients."""
    last, highest = len(alone), max(alone) * 1.05
    plot = sketch.panel(0.1, 0.2, 0.6, 0.76, x=(1, last), y=(-0.05 * highest, highest))
    for series, rank, name in ((alone, 1, "each on its own"), (averaged, 0, "gradients averaged")):
        points, colour = list(enumerate(series, start=1)), rank_colour(rank)
        plot.line(points, colour=colour, width=2)
        plot.marks(points, colour, size=0.75)
        plot.text(last, series[-1], f"{name}: {series[-1]:.2g}", colour=colour, bold=True, shift=(6, 0))
    plot.x_axis(range(2, last + 1, 2), "training step")
    plot.y_axis(nice(0, highest), "distance between\nthe two ranks' weights")
    return (
        f"Distance between the weights of two ranks over {last} steps. Each on its own, they differ from "
        f"the first step. With averaged gradients the distance stays {averaged[-1]:g}."
    )
