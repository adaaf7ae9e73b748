"""Lesson 04's drawings: who owns which slice of a flat buffer, and where the update goes in an all-reduce."""

import copy

from torch import nn

from zerolab.course.look import CATEGORY_COLOURS, ink_on, rank_colour
from zerolab.course.sketch import HATCH, INK, PALE, Sketch
from zerolab.precision import PRECISIONS
from zerolab.unit import FlatUnit

GRADS, PARAMS, OPTIMIZER = (CATEGORY_COLOURS[category] for category in ("grads", "params", "optimizer"))
REDUCE_SCATTER, ALL_GATHER = ("reduce-scatter\ngradients", GRADS), ("all-gather\ngradients", GRADS)
UPDATE_SHARD, SHARE = ("update\nΨ/N", OPTIMIZER), ("all-gather\nparameters", PARAMS)
ROWS = {
    "stage 0": ((REDUCE_SCATTER, ALL_GATHER, ("update\nΨ", OPTIMIZER)), "moves 2Ψ", "state: KΨ"),
    "stage 1": ((REDUCE_SCATTER, UPDATE_SHARD, SHARE), "moves 2Ψ", "state: KΨ/N"),
    "the mistake": ((REDUCE_SCATTER, ALL_GATHER, UPDATE_SHARD, SHARE), "moves 3Ψ", "state: KΨ/N"),
}


def partition_map(sketch: Sketch, layer: nn.Module, ranks: int = 4) -> str:
    """A real unit of `layer`, cut for so many ranks: parameters above, owners below, and in words."""
    unit = FlatUnit("layer", 0, list(copy.deepcopy(layer).named_parameters()), ranks, PRECISIONS["fp32"])
    strip = sketch.panel(0.085, 0.5, 0.9, 0.31, x=(0, unit.padded_numel), y=(0, 2))
    strip.rect(0, 1.1, unit.padded_numel, 0.8, HATCH, edge="#999999")
    for span in unit.spans:
        strip.rect(span.offset, 1.1, span.numel, 0.8, PALE, edge=INK)
        words = f"{span.name}\n{span.numel}"
        strip.text(span.offset + span.numel / 2, 2.0, words, align="middle", vertical="bottom", size=8.5)
    owned = []
    for rank in range(ranks):
        left, colour, y = rank * unit.shard_numel, rank_colour(rank), 0.45 - 0.055 * rank
        strip.rect(left, 0, unit.shard_numel, 0.9, colour, edge="white")
        label, middle = f"rank {rank}" if ranks < 7 else str(rank), left + unit.shard_numel / 2
        strip.text(middle, 0.45, label, align="middle", colour=ink_on(colour), bold=True)
        strip.line([(left, 0), (left, 1.9)], width=0.8, dash="3 2")
        pieces = ", ".join(unit.describe(slice(left, left + unit.shard_numel))) or "padding only"
        owned.append(f"rank {rank} owns {pieces}")
        sketch.text(0.085, y, "■", colour=colour, size=9, vertical="top")
        sketch.text(0.11, y, owned[-1], size=9, vertical="top")
    strip.y_axis({1.5: "holds", 0.45: "owner"}, line=False)
    padding = unit.padded_numel - unit.numel
    title = f"{unit.numel} parameters, {padding} of padding (hatched), {ranks} × {unit.shard_numel}"
    sketch.text(0.01, 0.98, title, bold=True, vertical="top")
    return f"A flat buffer: {title}. {'; '.join(owned)}."


def seam(sketch: Sketch) -> str:
    """A step's messages and its update: stage 0, stage 1, and a common mistake in stage 1."""
    rows = sketch.panel(0.005, 0.01, 0.99, 0.98, x=(0, 7.3), y=(-0.05, 2.8))
    listed = []
    for row, (title, (boxes, moves, state)) in enumerate(ROWS.items()):
        y, x = 2 - row, 1.15
        rows.text(1.05, y + 0.36, title, align="right", bold=True)
        for label, colour in boxes:
            width = 0.85 if "update" in label else 1.35
            rows.rect(x, y, width - 0.06, 0.72, colour)
            middle = x + width / 2 - 0.03
            rows.text(middle, y + 0.36, label, align="middle", colour=ink_on(colour), size=9)
            x += width
        rows.text(6.15, y + 0.36, f"{moves}\n{state}")
        steps = ", ".join(label.replace("\n", " ") for label, _ in boxes)
        listed.append(f"{title}: {steps}; {moves}, {state}")
    return f"The steps in order. {'. '.join(listed)}."
