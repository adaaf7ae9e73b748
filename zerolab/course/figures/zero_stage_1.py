"""Lesson 04's drawings: who owns which slice of a flat buffer, and where the update goes in an all-reduce."""

import copy

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import nn

from zerolab.course.look import CATEGORY_COLOURS, INK, PALE, ink_on, rank_colour
from zerolab.precision import PRECISIONS
from zerolab.unit import FlatUnit


def partition_map(figure: Figure, layer: nn.Module, ranks: int = 4) -> str:
    """A real FlatUnit of `layer`, cut for so many ranks: parameters above, owners below, and in words."""
    unit = FlatUnit("layer", 0, list(copy.deepcopy(layer).named_parameters()), ranks, PRECISIONS["fp32"])
    axes = figure.add_axes((0.085, 0.5, 0.9, 0.31))
    axes.add_patch(
        Rectangle((0, 1.1), unit.padded_numel, 0.8, facecolor="white", edgecolor="#999999", hatch="////")
    )
    for span in unit.spans:
        axes.add_patch(Rectangle((span.offset, 1.1), span.numel, 0.8, facecolor=PALE, edgecolor=INK))
        middle = span.offset + span.numel / 2
        axes.text(middle, 2.0, f"{span.name}\n{span.numel}", ha="center", va="bottom", fontsize=8.5)
    for rank in range(ranks):
        left = rank * unit.shard_numel
        colour = rank_colour(rank)
        axes.add_patch(Rectangle((left, 0), unit.shard_numel, 0.9, facecolor=colour, edgecolor="white"))
        label = f"rank {rank}" if ranks < 7 else str(rank)
        middle = left + unit.shard_numel / 2
        axes.text(middle, 0.45, label, ha="center", va="center", color=ink_on(colour), weight="bold")
        axes.plot([left, left], [0, 1.9], color=INK, linewidth=0.8, linestyle=(0, (3, 2)), clip_on=False)
    axes.set(
        xlim=(0, unit.padded_numel),
        ylim=(0, 2),
        xticks=[],
        yticks=(1.5, 0.45),
        yticklabels=("holds", "owner"),
    )
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    return _in_words(figure, unit, ranks)


def _in_words(figure: Figure, unit: FlatUnit, ranks: int) -> str:
    """Under the picture, what each rank owns; the same as alt text."""
    padding = unit.padded_numel - unit.numel
    title = f"{unit.numel} parameters, {padding} of padding (hatched), {ranks} × {unit.shard_numel}"
    figure.text(0.01, 0.99, title, weight="bold", va="top")
    owned = []
    for rank in range(ranks):
        left, y = rank * unit.shard_numel, 0.45 - 0.055 * rank
        pieces = ", ".join(unit.describe(slice(left, left + unit.shard_numel))) or "padding only"
        owned.append(f"rank {rank} owns {pieces}")
        figure.text(0.085, y, "■", color=rank_colour(rank), fontsize=9, va="top")
        figure.text(0.11, y, owned[-1], fontsize=9, va="top")
    return f"A flat buffer: {title}. {'; '.join(owned)}."


GRADS, PARAMS, OPTIMIZER = (CATEGORY_COLOURS[category] for category in ("grads", "params", "optimizer"))
HALVES = (("reduce-scatter\ngradients", GRADS), ("all-gather\ngradients", GRADS))
ROWS = (
    ("stage 0", (*HALVES, ("update\nΨ", OPTIMIZER)), "moves 2Ψ", "state: KΨ"),
    (
        "stage 1",
        (HALVES[0], ("update\nΨ/N", OPTIMIZER), ("all-gather\nparameters", PARAMS)),
        "moves 2Ψ",
        "state: KΨ/N",
    ),
    (
        "the mistake",
        (*HALVES, ("update\nΨ/N", OPTIMIZER), ("all-gather\nparameters", PARAMS)),
        "moves 3Ψ",
        "state: KΨ/N",
    ),
)


def seam(figure: Figure) -> str:
    """A step's messages and its update: stage 0, stage 1, and stage 1 as it is often built."""
    axes = figure.add_axes((0.005, 0.01, 0.99, 0.98))
    listed = []
    for row, (title, boxes, moves, state) in enumerate(ROWS):
        y, x = 2 - row, 1.15
        axes.text(1.05, y + 0.36, title, ha="right", va="center", weight="bold")
        for label, colour in boxes:
            width = 0.85 if "update" in label else 1.35
            axes.add_patch(Rectangle((x, y), width - 0.06, 0.72, facecolor=colour))
            axes.text(
                x + width / 2 - 0.03,
                y + 0.36,
                label,
                ha="center",
                va="center",
                color=ink_on(colour),
                fontsize=9,
            )
            x += width
        axes.text(6.15, y + 0.36, f"{moves}\n{state}", va="center", fontsize=10)
        steps = ", ".join(label.replace("\n", " ") for label, _ in boxes)
        listed.append(f"{title}: {steps}; {moves}, {state}")
    axes.set(xlim=(0, 7.3), ylim=(-0.05, 2.8))
    axes.axis("off")
    return f"The steps in order. {'. '.join(listed)}."
