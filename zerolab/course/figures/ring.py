"""Lesson 02's drawings: the ring's chunks moving, drawn from what a real run reported."""

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from matplotlib.path import Path

from zerolab.course.look import INK, ink_on, rank_colour

Sum = tuple[int, ...]  # the ranks whose contributions a chunk holds, in the order of arrival
Rounds = list[list[tuple[int, int, int, int]]]  # by rank: (step, sent, received, bytes) of each round
CELL = 0.84  # a chunk's width where the next one starts at 1


def holdings(rounds: Rounds, upto: int) -> list[list[Sum]]:
    """Which ranks' contributions each rank's chunks hold after `upto` rounds of an all-reduce.

    `rounds[rank]` is what that rank's on_step reported: N-1 rounds that add, then N-1 rounds that replace.
    """
    world_size = len(rounds)
    held = [[(rank,)] * world_size for rank in range(world_size)]
    for number in range(upto):
        before = [list(row) for row in held]
        for rank in range(world_size):
            _, _, received, _ = rounds[rank][number]
            arriving = before[(rank - 1) % world_size][received]
            held[rank][received] = arriving + held[rank][received] if number < world_size - 1 else arriving
    return held


def ring_step(figure: Figure, recorded: dict[int, Rounds], ranks: int = 4, step: int = 1) -> str:
    """Every rank's chunks after `step` rounds of the run `recorded[ranks]`, and the last round's messages."""
    rounds = recorded[ranks]
    step = min(step, 2 * (ranks - 1))
    held = holdings(rounds, step)
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.86))
    _draw_chunks(axes, held)
    for rank in range(ranks):
        axes.text(-0.08, rank, f"rank {rank}", ha="right", va="center", weight="bold")
        axes.text(rank + CELL / 2, -0.6, f"chunk {rank}", ha="center", va="center")
        if step:
            _draw_message(axes, rank, rounds[rank][step - 1][1], ranks)
    axes.set(xlim=(-0.6, ranks), ylim=(ranks - 0.5, -0.85))
    axes.axis("off")
    title = _title(step, ranks)
    figure.text(0.01, 0.97, title, weight="bold", va="top")
    complete = sum(len(chunk) == ranks for row in held for chunk in row)
    return f"{title} {_moves(rounds, step)}{complete} of {ranks**2} chunks hold the sum of all {ranks} ranks."


def _draw_chunks(axes, held: list[list[Sum]]) -> None:
    """All boxes in two collections: drawing them one by one would be felt at the slider."""
    ranks = len(held)
    width = CELL / ranks
    parts, colours, frames, weights = [], [], [], []
    for rank, row in enumerate(held):
        for chunk, contributors in enumerate(row):
            frames.append(_box(chunk, rank, CELL))
            weights.append(2.2 if len(contributors) == ranks else 0.7)
            for place, contributor in enumerate(sorted(contributors)):
                parts.append(_box(chunk + place * width, rank, width))
                colours.append(rank_colour(contributor))
                axes.text(
                    chunk + (place + 0.5) * width,
                    rank,
                    str(contributor),
                    color=ink_on(colours[-1]),
                    ha="center",
                    va="center",
                    clip_on=False,
                )
    axes.add_collection(PolyCollection(parts, facecolors=colours, linewidths=0), autolim=False)
    axes.add_collection(
        PolyCollection(frames, facecolors="none", edgecolors=INK, linewidths=weights), autolim=False
    )


def _box(left: float, rank: int, width: float) -> list[tuple[float, float]]:
    top, bottom = rank - 0.28, rank + 0.28
    return [(left, top), (left + width, top), (left + width, bottom), (left, bottom)]


def _draw_message(axes, rank: int, chunk: int, ranks: int) -> None:
    """An arrow from the sender to the receiver below; the last rank's goes around, back to the first."""
    receiver, side = (rank + 1) % ranks, chunk + CELL
    if receiver > rank:
        road = [(chunk + CELL / 2, rank + 0.29), (chunk + CELL / 2, receiver - 0.29)]
    else:
        road = [(side, rank), (side + 0.1, rank), (side + 0.1, receiver), (side, receiver)]
    arrow = FancyArrowPatch(
        path=Path(road), arrowstyle="-|>", mutation_scale=13, color=INK, linewidth=1.4, clip_on=False
    )
    axes.add_artist(arrow)


def _title(step: int, ranks: int) -> str:
    rounds = ranks - 1
    if step == 0:
        return f"Before: each of {ranks} ranks holds only its own contribution to every chunk."
    if step <= rounds:
        done = " Each rank's own chunk is now complete." if step == rounds else ""
        return f"Reduce-scatter, round {step} of {rounds}: what arrives is added.{done}"
    done = " Everyone has everything." if step == 2 * rounds else ""
    return f"All-gather, round {step - rounds} of {rounds}: what arrives replaces.{done}"


def _moves(rounds: Rounds, step: int) -> str:
    if not step:
        return ""
    sent = ", ".join(f"rank {rank} sent chunk {rounds[rank][step - 1][1]}" for rank in range(len(rounds)))
    return f"In this round {sent}. "
