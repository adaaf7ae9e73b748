"""Lesson 00's diagram: processes that share no memory."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zerolab.course.look import INK, QUIET, ink_on, rank_colour


def separate_memories(fig: Figure, world_size: int = 4) -> str:
    """Return one box for each process, each with its own x, and a line for the messages."""
    ax = fig.subplots()
    centred: dict[str, Any] = {"ha": "center", "va": "center"}
    for rank in range(world_size):
        colour = rank_colour(rank)
        ax.add_patch(Rectangle((rank - 0.42, 0.3), 0.84, 0.7, fill=False, edgecolor=QUIET))
        ax.add_patch(Rectangle((rank - 0.33, 0.4), 0.66, 0.24, color=colour))
        ax.text(rank, 0.52, "its own x", color=ink_on(colour), **centred)
        ax.text(rank, 0.83, f"rank {rank}", weight="bold", **centred)
        ax.plot([rank, rank], [0.15, 0.3], color=INK, marker="")
    ax.plot([0, world_size - 1], [0.15, 0.15], color=INK, marker="")
    words = "messages: the only connection between them"
    ax.text(world_size / 2 - 0.5, 0, words, **centred)
    ax.set(xlim=(-0.5, world_size - 0.5), ylim=(-0.1, 1.05))
    ax.set_axis_off()
    boxes = f"{world_size} separate boxes, rank 0 to rank {world_size - 1}, each with its own copy of x"
    return f"{boxes}. A line below connects them: {words}."
