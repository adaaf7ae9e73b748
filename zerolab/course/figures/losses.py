"""The last drawing of lessons 04 to 06: the sharded model's loss upon the single process's."""

from zerolab.course.look import CATEGORY_COLOURS
from zerolab.course.sketch import Sketch, nice


def both_losses(
    sketch: Sketch, sharded: list[float], single: list[float], stage: int, per: str = "step"
) -> str:
    """The sharded run's loss drawn thinly over the single process's broad line: one curve, if they agree."""
    low, high, last = min(sharded + single), max(sharded + single), len(single) - 1
    room = 0.06 * (high - low)
    plot = sketch.panel(0.09, 0.18, 0.89, 0.76, x=(-0.04 * last, 1.04 * last), y=(low - room, high + room))
    curves = (
        ("one process, plain Adam", single, "#BBBBBB", 7),
        (f"stage {stage}, sharded", sharded, CATEGORY_COLOURS["params"], 1.6),
    )
    for row, (name, losses, colour, width) in enumerate(curves):
        plot.line(enumerate(losses), colour=colour, width=width)
        height = 0.87 - 0.095 * row
        sketch.line([(0.68, height), (0.72, height)], colour=colour, width=width)
        sketch.text(0.74, height, name)
    plot.x_axis(sorted({round(step) for step in nice(0, last)}), per)
    plot.y_axis(nice(low, high, 6), "loss (nats per byte)")
    same = "lie exactly on top of each other" if sharded == single else "part"
    return (
        f"The loss of each {per}, at stage {stage} and in one process with plain Adam: the two curves {same}."
    )
