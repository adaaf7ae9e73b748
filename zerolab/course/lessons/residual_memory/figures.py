"""Lesson 07's drawing: a pair of layers that is cut over two ranks."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zerolab.course.look import INK, PALE, ink_on, rank_colour

_CENTRED: dict[str, Any] = {"ha": "center", "va": "center"}
# Of each rank: what it has of A and of B.
_LANES = (("left columns\nof A", "upper rows\nof B"), ("right columns\nof A", "lower rows\nof B"))


def split_pair(fig: Figure) -> str:
    """Two linear layers, cut over two ranks: f before the first, g after the second, in each lane."""
    ax = fig.subplots()
    for rank, (columns, rows) in enumerate(_LANES):
        colour = rank_colour(rank)
        ax.plot([0.1, 7.15], [rank, rank], color=colour, linewidth=2, marker="", zorder=1)
        for words, left, width in ((columns, 1.2, 1.6), ("gelu", 3.0, 0.8), (rows, 4.0, 1.5)):
            ax.add_patch(Rectangle((left, rank - 0.3), width, 0.6, facecolor=colour, zorder=3))
            ax.text(left + width / 2, rank, words, size=9, color=ink_on(colour), zorder=4, **_CENTRED)
        for letter, left in (("f", 0.5), ("g", 5.9)):
            box = Rectangle((left, rank - 0.22), 0.45, 0.44, facecolor=PALE, edgecolor=INK, zorder=3)
            ax.add_patch(box)
            ax.text(left + 0.225, rank, letter, weight="bold", zorder=4, **_CENTRED)
        for letter, left in (("x", -0.08), ("y", 7.33)):
            ax.text(left, rank, letter, **_CENTRED)
        ax.text(3.4, rank - 0.45, f"rank {rank}", size=9, **_CENTRED)
    for middle, pass_name in ((0.725, "backward"), (6.125, "forward")):
        ax.plot([middle, middle], [0.22, 0.78], color=INK, linewidth=1, linestyle=":", marker="")
        ax.text(middle, 1.5, f"sum in\n{pass_name}", size=9, **_CENTRED)
    ax.set(xlim=(-0.3, 7.5), ylim=(1.78, -0.62), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    return (
        "Rank 0 has the left columns of A and the upper rows of B, rank 1 the right columns and the lower "
        "rows. On each rank x goes through f, the columns of A, gelu, the rows of B and g, and becomes y. "
        "The two f add up over the ranks in backward, the two g in forward."
    )
