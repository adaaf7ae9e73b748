"""Lesson 00's drawings: processes that share nothing, and models that nobody keeps in step."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from zerolab.course.look import INK, ink_on, rank_colour


def separate_memories(figure: Figure, world_size: int = 4) -> str:
    """One box a process, each with its own x, and a line that carries only what is sent."""
    axes = figure.add_axes((0.01, 0.02, 0.98, 0.96))
    for rank in range(world_size):
        frame = FancyBboxPatch(
            (rank, 0.35), 0.78, 0.6, boxstyle="round,pad=0.04", fill=False, edgecolor="#888888"
        )
        axes.add_patch(frame)
        axes.text(rank + 0.39, 0.86, f"rank {rank}", ha="center", va="center", weight="bold")
        colour = rank_colour(rank)
        label = {"facecolor": colour, "linewidth": 0, "boxstyle": "round,pad=0.4"}
        axes.text(rank + 0.39, 0.58, "its own x", ha="center", va="center", color=ink_on(colour), bbox=label)
        axes.plot([rank + 0.39] * 2, [0.12, 0.31], color=INK, linewidth=1.2)
    axes.plot([0.39, world_size - 0.61], [0.12, 0.12], color=INK, linewidth=1.2)
    axes.text(
        world_size / 2 - 0.11, 0.0, "messages: the only way from one to another", ha="center", va="center"
    )
    axes.set(xlim=(-0.15, world_size - 0.05), ylim=(-0.08, 1.05))
    axes.axis("off")
    return (
        f"{world_size} separate boxes, rank 0 to rank {world_size - 1}, each with its own copy of x; a "
        "line below joins "
        "them, labelled: messages, the only way from one to another."
    )


def drift(figure: Figure, alone: Sequence[float], averaged: Sequence[float]) -> str:
    """How far apart the weights of two ranks are, step by step, without and with averaged gradients."""
    axes = figure.add_axes((0.1, 0.2, 0.6, 0.76))
    steps = range(1, len(alone) + 1)
    for series, rank, name in ((alone, 1, "each on its own"), (averaged, 0, "gradients averaged")):
        axes.plot(steps, series, color=rank_colour(rank), linewidth=2, marker="o", markersize=3)
        text = f" {name}: {series[-1]:.2g}"
        axes.text(len(alone), series[-1], text, color=rank_colour(rank), va="center", weight="bold")
    axes.set(xlabel="training step", ylabel="distance between\nthe two ranks' weights", xlim=(1, len(alone)))
    return (
        f"Distance between the weights of two ranks over {len(alone)} steps: each on its own they part "
        "from the first "
        f"step; with averaged gradients the distance stays {averaged[-1]:g}."
    )
