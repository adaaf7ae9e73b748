"""Lesson 04's diagrams: who owns which slice of a flat buffer, and where the update goes in an all-reduce."""

import copy
from typing import Any

from matplotlib.figure import Figure
from torch import nn

from zerolab.course.look import COLOURS, INK, PALE, QUIET, ink_on, rank_colour
from zerolab.precision import PRECISIONS
from zerolab.unit import FlatUnit

REDUCE_SCATTER, ALL_GATHER = ("reduce-scatter", "gradients"), ("all-gather", "gradients")
UPDATE_SHARD, SHARE = ("update Ψ/N", "optimizer state"), ("all-gather", "parameters")
ROWS = {
    "stage 0\n2Ψ, state KΨ": (REDUCE_SCATTER, ALL_GATHER, ("update Ψ", "optimizer state")),
    "stage 1\n2Ψ, state KΨ/N": (REDUCE_SCATTER, UPDATE_SHARD, SHARE),
    "the mistake\n3Ψ, state KΨ/N": (REDUCE_SCATTER, ALL_GATHER, UPDATE_SHARD, SHARE),
}
_CENTRED: dict[str, Any] = {"ha": "center", "va": "center"}


def partition_map(fig: Figure, layer: nn.Module, ranks: int = 4) -> str:
    """Return a real unit of `layer`, cut for so many ranks: parameters above, owners below, and in words."""
    unit = FlatUnit("layer", 0, list(copy.deepcopy(layer).named_parameters()), ranks, PRECISIONS["fp32"])
    ax, key = fig.subplots(2, height_ratios=[1, 1.1])
    ax.barh(1, unit.padded_numel, hatch="////", facecolor="none", edgecolor=QUIET, linewidth=0.5)
    for place, span in enumerate(unit.spans):
        ax.barh(1, span.numel, left=span.offset, color=PALE, edgecolor=INK)
        at_the_end = span.offset > 0.8 * unit.padded_numel
        corner = span.offset + span.numel * at_the_end, 1.5 + 0.5 * (place % 2)
        ax.text(*corner, f"{span.name}: {span.numel}", size=9, ha="right" if at_the_end else "left")
    owned = []
    for rank in range(ranks):
        left, colour = rank * unit.shard_numel, rank_colour(rank)
        ax.barh(0, unit.shard_numel, left=left, color=colour, edgecolor="white")
        ax.text(left + unit.shard_numel / 2, 0, str(rank), color=ink_on(colour), weight="bold", **_CENTRED)
        ax.plot([left, left], [-0.4, 1.4], color=INK, linestyle=":", linewidth=0.8, marker="")
        pieces = ", ".join(unit.describe(slice(left, left + unit.shard_numel))) or "padding only"
        owned.append(f"rank {rank} owns {pieces}")
    key.text(0, 1, "\n".join(owned), size=9, va="top", linespacing=1.3)
    key.set_axis_off()
    padding = unit.padded_numel - unit.numel
    title = f"{unit.numel} parameters, {padding} of padding (hatched), {ranks} × {unit.shard_numel}"
    fig.suptitle(title, x=0.02, ha="left", size=10, weight="bold")
    ax.set(yticks=[0, 1], yticklabels=["owner", "holds"], xlim=(0, unit.padded_numel), ylim=(-0.5, 2.4))
    ax.spines[:].set_visible(False)
    return f"A flat buffer: {title}. {'; '.join(owned)}."


def seam(fig: Figure) -> str:
    """A step's messages and its update: stage 0, stage 1, and a common mistake in stage 1."""
    ax, listed, named = fig.subplots(), [], set()
    for row, (title, boxes) in enumerate(ROWS.items()):
        left = 0.0
        for words, category in boxes:
            width, colour = 0.8 if "update" in words else 1.0, COLOURS[category]
            label = category if category not in named else None
            ax.barh(row, width, left=left, color=colour, edgecolor="white", label=label)
            text = words.replace(" ", "\n").replace("-", "-\n")
            ax.text(left + width / 2, row, text, size=9, color=ink_on(colour), **_CENTRED)
            left += width
            named.add(category)
        steps = ", ".join(f"{words} ({category})" for words, category in boxes)
        listed.append(f"{title}: {steps}".replace("\n", ", moves "))
    ax.set(yticks=range(len(ROWS)), yticklabels=ROWS, xticks=[], xlim=(0, 3.85))
    ax.invert_yaxis()
    ax.spines[:].set_visible(False)
    return f"The steps in order. {'. '.join(listed)}."
