"""The last drawing of lessons 05 and 06: the sharded model's loss upon the single process's."""

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from zerolab.course.look import CATEGORY_COLOURS


def both_losses(
    figure: Figure, sharded: list[float], single: list[float], stage: int, per: str = "step"
) -> str:
    """The sharded run's loss drawn thinly over the single process's broad line: one curve, if they agree."""
    axes = figure.add_axes((0.09, 0.18, 0.89, 0.76))
    axes.plot(single, color="#BBBBBB", linewidth=7, solid_capstyle="round", label="one process, plain Adam")
    axes.plot(sharded, color=CATEGORY_COLOURS["params"], linewidth=1.6, label=f"stage {stage}, sharded")
    axes.set(xlabel=per, ylabel="loss (nats per byte)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper right")
    same = "lie exactly on top of each other" if sharded == single else "part"
    return (
        f"The loss of each {per}, at stage {stage} and in one process with plain Adam: the two curves {same}."
    )
