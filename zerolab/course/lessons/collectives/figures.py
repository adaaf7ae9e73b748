"""Lesson 02's diagram: a ring and the chunks of its ranks, drawn from what a real run reported."""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.markers import MarkerStyle
from matplotlib.patches import Circle, Rectangle

from zerolab.course.look import INK, PAPER, QUIET, ink_on, rank_colour

Sum = tuple[int, ...]  # the ranks whose contributions a chunk holds
Rounds = list[list[tuple[int, int, int, int]]]  # by rank: (step, sent, received, bytes) of each round
CELL = 0.86  # a chunk's width where the next one starts at 1


def holdings(rounds: Rounds, upto: int) -> list[list[Sum]]:
    """Return which ranks' contributions each rank's chunks hold after `upto` rounds of an all-reduce.

    `rounds[rank]` is what that rank's on_step reported: N-1 rounds that add, then N-1 rounds that replace.
    """
    world_size = len(rounds)
    held: list[list[Sum]] = [[(rank,)] * world_size for rank in range(world_size)]
    for number in range(upto):
        before = [list(row) for row in held]
        for rank in range(world_size):
            _, _, received, _ = rounds[rank][number]
            arriving = before[(rank - 1) % world_size][received]
            held[rank][received] = arriving + held[rank][received] if number < world_size - 1 else arriving
    return held


def ring_step(fig: Figure, recorded: dict[int, Rounds], ranks: int = 4, step: int = 1) -> str:
    """The last round's messages on the ring, and every rank's chunks after `step` rounds of the run."""
    rounds, held = recorded[ranks], holdings(recorded[ranks], step)
    ring, grid = fig.subplots(1, 2, width_ratios=[1, 2])
    sent = [rounds[rank][step - 1][1] for rank in range(ranks)] if step else []
    _draw_ring(ring, ranks, sent)
    arrived = {(rank, rounds[rank][step - 1][2]) for rank in range(ranks)} if step else set()
    _draw_parts(grid, held)
    _draw_frames(grid, held, arrived)
    names = range(ranks)
    grid.set(xlim=(-0.1, ranks), ylim=(ranks - 0.6, -0.6), yticks=names, xticks=[n + CELL / 2 for n in names])
    grid.set(xticklabels=names, xlabel="chunk", yticklabels=[f"rank {n}" for n in names])
    grid.tick_params(length=0, labelsize=9)
    for side in ("left", "bottom"):
        grid.spines[side].set_visible(False)
    title = _title(step, ranks)
    fig.suptitle(title.replace(": ", ":\n"), x=0.02, ha="left", size=10, weight="bold")
    complete = sum(len(chunk) == ranks for row in held for chunk in row)
    moves = ", ".join(f"rank {rank} sent chunk {chunk}" for rank, chunk in enumerate(sent))
    said = f"{title} In this round {moves}." if sent else title
    return f"{said} {complete} of {ranks**2} chunks hold the sum of all {ranks} ranks."


def _draw_ring(ring: Axes, ranks: int, sent: list[int]) -> None:
    """The ranks in a circle, clockwise, and on each link the chunk that it carried in this round."""
    turn = [math.pi / 2 - 2 * math.pi * rank / ranks for rank in range(ranks + 1)]
    centred: dict[str, Any] = {"ha": "center", "va": "center"}
    for rank, chunk in enumerate(sent):
        ends = [(math.cos(angle), math.sin(angle)) for angle in turn[rank : rank + 2]]
        bend = {"arrowstyle": "-|>", "connectionstyle": "arc3,rad=-0.35", "shrinkA": 11, "shrinkB": 11}
        ring.annotate("", ends[1], ends[0], arrowprops=bend | {"color": INK})
        middle = turn[rank] - math.pi / ranks
        out = 0.9 if ranks > 2 else 0.5
        ring.text(out * math.cos(middle), out * math.sin(middle), str(chunk), size=9, bbox=_BOX, **centred)
    for rank in range(ranks):
        x, y = math.cos(turn[rank]), math.sin(turn[rank])
        ring.add_patch(Circle((x, y), 0.3, color=rank_colour(rank), zorder=3))
        ring.text(x, y, str(rank), color=ink_on(rank_colour(rank)), weight="bold", zorder=4, **centred)
    ring.set(xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), aspect="equal")
    ring.set_axis_off()


_BOX = {"facecolor": PAPER, "edgecolor": QUIET, "pad": 1.5}


def _draw_parts(grid: Axes, held: list[list[Sum]]) -> None:
    """In the box of each chunk a part for every rank whose numbers have been added, with that rank's digit.

    The parts are one collection and a rank's digits are markers, because an artist for each takes longer.
    """
    width = CELL / len(held)
    parts, colours = [], []
    for contributor in range(len(held)):
        lefts, rows = zip(*_places(held, contributor, width), strict=True)
        parts += [Rectangle((left, row - 0.38), width, 0.76) for left, row in zip(lefts, rows, strict=True)]
        colours += [rank_colour(contributor)] * len(rows)
        middles, ink = [left + width / 2 for left in lefts], ink_on(rank_colour(contributor))
        digits: dict[str, Any] = {"marker": _digit(contributor), "markersize": 6, "markeredgewidth": 0}
        grid.plot(middles, rows, linestyle="", color=ink, **digits)
    grid.add_collection(PatchCollection(parts, color=colours))


@cache  # a marker's outline takes longer to make than to draw
def _digit(rank: int) -> MarkerStyle:
    return MarkerStyle(f"${rank}$")


def _places(held: list[list[Sum]], contributor: int, width: float) -> Iterator[tuple[float, int]]:
    """The left end and the row of each part that is a rank's."""
    for rank, chunks in enumerate(held):
        for chunk, contributors in enumerate(chunks):
            if contributor in contributors:
                yield chunk + sorted(contributors).index(contributor) * width, rank


def _draw_frames(grid: Axes, held: list[list[Sum]], arrived: set[tuple[int, int]]) -> None:
    """A box for each chunk of each rank; dashed if it just arrived, thick if complete."""
    ranks = len(held)
    boxes = [(rank, chunk) for rank in range(ranks) for chunk in range(ranks)]
    frames = [Rectangle((chunk, rank - 0.38), CELL, 0.76) for rank, chunk in boxes]
    widths = [
        2.4 if len(held[rank][chunk]) == ranks else 1.5 if (rank, chunk) in arrived else 0.7
        for rank, chunk in boxes
    ]
    styles = ["--" if box in arrived else "-" for box in boxes]
    looks: dict[str, Any] = {"facecolor": "none", "edgecolor": INK, "zorder": 3}
    grid.add_collection(PatchCollection(frames, linewidths=widths, linestyles=styles, **looks))


def _title(step: int, ranks: int) -> str:
    rounds = ranks - 1
    if step == 0:
        return f"Before: each of {ranks} ranks holds only its own contribution to every chunk."
    done = {rounds: " Each rank's own chunk is now complete.", 2 * rounds: " All ranks have all chunks."}
    name, what = ("Reduce-scatter", "is added") if step <= rounds else ("All-gather", "replaces")
    return f"{name}, round {(step - 1) % rounds + 1} of {rounds}: what arrives {what}.{done.get(step, '')}"
