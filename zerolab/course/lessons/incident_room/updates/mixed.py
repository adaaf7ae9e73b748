"""Lesson 09: updates in which numbers of one parameter, or of one of its uses, are mixed with others."""

from collections.abc import Sequence

import torch

from zerolab.course.lessons.incident_room.lockstep import Lockstep, mean
from zerolab.course.lessons.incident_room.room import LR, NAMES, batches
from zerolab.course.lessons.incident_room.updates.steps import BEGINS, Piece, Step, gradients
from zerolab.course.patterns import rule
from zerolab.course.reading import factors, made_of


def uses(step: Step) -> str | None:
    """How often each use of the tied weight counts."""
    parts, tied = {}, slice(NAMES["body"], None)
    ranks = range(step.case.ranks)
    for name, each in (("its use in the embedding", (1.0, 0.0)), ("its use in the head", (0.0, 1.0))):
        world = Lockstep(step.case.ranks)
        world.uses = each
        found = [[world.gradient(b, step.before) for b in batches(step.case, rank)] for rank in ranks]
        parts[name] = -LR * mean(found)[tied]
    got, want = (step.after[0] - step.before)[tied], (step.want - step.before)[tied]
    said = made_of(got, want, [parts])
    return f"{said}, in the tied weight" if said else None


def summands(step: Step, every: Sequence[Piece]) -> str | None:
    """What the first wrong shard's update is a sum of: gradients of its own parameter, and of others."""
    wrong = [piece for piece in every if step.wrong(piece)]
    first = [piece for piece in wrong if piece.name == wrong[0].name]  # one parameter tells enough
    found = {}
    for piece in first:
        parts = _parts(step, piece)
        found[piece.owner] = factors(step.got(piece), step.right(piece), [parts])
    known = {rank: pair for rank, pair in found.items() if pair}
    explain = lambda *_: rule(known) if len(known) == len(found) else None
    parts = _parts(step, first[0])
    said = made_of(step.got(first[0]), step.right(first[0]), [parts], explain)
    return f"in {first[0]} {said}" if said else None


def _parts(step: Step, piece: Piece) -> dict[str, torch.Tensor]:
    """Each rank's gradients of a shard, and of the same places in the other parameters."""
    parts = {}
    begin = BEGINS[piece.name] if piece.name else 0
    start, stop = piece.cut.start - begin, piece.cut.stop - begin
    others = [name for name, size in NAMES.items() if piece.name not in ("", name) and stop <= size]
    for rank, own in enumerate(gradients(step)):
        for micro, gradient in enumerate(own):
            which = f"'s micro-batch {micro}" if step.case.micro_batches > 1 else "'s gradient"
            parts[f"rank {rank}{which}"] = -LR * gradient[piece.cut]
            for other in others:
                there = slice(BEGINS[other] + start, BEGINS[other] + stop)
                parts[f"rank {rank}{which} of {other}"] = -LR * gradient[there]
    return parts
