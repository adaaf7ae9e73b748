"""Lesson 02's drawing: the chunks of a ring, drawn from what a real run reported."""

from zerolab.course.look import ink_on, rank_colour
from zerolab.course.sketch import INK, Panel, Sketch

Sum = tuple[int, ...]  # the ranks whose contributions a chunk holds
Rounds = list[list[tuple[int, int, int, int]]]  # by rank: (step, sent, received, bytes) of each round
CELL = 0.84  # a chunk's width where the next one starts at 1


def holdings(rounds: Rounds, upto: int) -> list[list[Sum]]:
    """Which ranks' contributions each rank's chunks hold after `upto` rounds of an all-reduce.

    `rounds[rank]` is what that rank's on_step reported: N-1 rounds that add, then N-1 rounds that replace.
    """
    world_size = len(rounds)
    held: list[list[tuple[int, ...]]] = [[(rank,)] * world_size for rank in range(world_size)]
    for number in range(upto):
        before = [list(row) for row in held]
        for rank in range(world_size):
            _, _, received, _ = rounds[rank][number]
            arriving = before[(rank - 1) % world_size][received]
            held[rank][received] = arriving + held[rank][received] if number < world_size - 1 else arriving
    return held


def ring_step(sketch: Sketch, recorded: dict[int, Rounds], ranks: int = 4, step: int = 1) -> str:
    """Every rank's chunks after `step` rounds of the run `recorded[ranks]`, and the last round's messages."""
    rounds = recorded[ranks]
    step = min(step, 2 * (ranks - 1))
    held = holdings(rounds, step)
    grid = sketch.panel(0.01, 0.01, 0.98, 0.86, x=(-0.6, ranks), y=(ranks - 0.5, -0.85))
    for rank in range(ranks):
        grid.text(-0.08, rank, f"rank {rank}", align="right", bold=True)
        grid.text(rank + CELL / 2, -0.6, f"chunk {rank}", align="middle")
        for chunk, contributors in enumerate(held[rank]):
            _draw_chunk(grid, rank, chunk, contributors, ranks)
    sent = [rounds[rank][step - 1][1] for rank in range(ranks)] if step else []
    for rank, chunk in enumerate(sent):
        _draw_message(grid, rank, chunk, ranks)
    title = _title(step, ranks)
    sketch.text(0.01, 0.97, title, bold=True, vertical="top")
    complete = sum(len(chunk) == ranks for row in held for chunk in row)
    moves = ", ".join(f"rank {rank} sent chunk {chunk}" for rank, chunk in enumerate(sent))
    said = f"{title} In this round {moves}." if sent else title
    return f"{said} {complete} of {ranks**2} chunks hold the sum of all {ranks} ranks."


def _draw_chunk(grid: Panel, rank: int, chunk: int, contributors: Sum, ranks: int) -> None:
    """A frame with a box for each rank whose numbers have been added; a thick frame when all have."""
    width = CELL / ranks
    for place, contributor in enumerate(sorted(contributors)):
        left, colour = chunk + place * width, rank_colour(contributor)
        grid.rect(left, rank - 0.28, width, 0.56, colour)
        grid.text(left + width / 2, rank, str(contributor), colour=ink_on(colour), align="middle")
    weight = 2.2 if len(contributors) == ranks else 0.7
    grid.rect(chunk, rank - 0.28, CELL, 0.56, "none", edge=INK, line=weight)


def _draw_message(grid: Panel, rank: int, chunk: int, ranks: int) -> None:
    """An arrow from the sender to the receiver below; the last rank's goes back to the first."""
    receiver, side = (rank + 1) % ranks, chunk + CELL
    if receiver > rank:
        grid.arrow([(chunk + CELL / 2, rank + 0.29), (chunk + CELL / 2, receiver - 0.31)])
    else:
        grid.arrow([(side, rank), (side + 0.1, rank), (side + 0.1, receiver), (side + 0.015, receiver)])


def _title(step: int, ranks: int) -> str:
    rounds = ranks - 1
    if step == 0:
        return f"Before: each of {ranks} ranks holds only its own contribution to every chunk."
    done = {rounds: " Each rank's own chunk is now complete.", 2 * rounds: " All ranks have all chunks."}
    name, what = ("Reduce-scatter", "is added") if step <= rounds else ("All-gather", "replaces")
    return f"{name}, round {(step - 1) % rounds + 1} of {rounds}: what arrives {what}.{done.get(step, '')}"
