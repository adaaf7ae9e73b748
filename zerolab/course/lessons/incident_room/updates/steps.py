"""Lesson 09: the first step in which a rank's parameters are wrong, and what its updates are made of.

An update is a sum of gradients, each with a factor, so the factors are computed from the numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from zerolab import ring
from zerolab.course.lessons.incident_room.engine import MOMENTUM
from zerolab.course.lessons.incident_room.lockstep import Lockstep, Tensors, chunk
from zerolab.course.lessons.incident_room.room import LR, NAMES, Case, batches, start
from zerolab.course.lessons.incident_room.runs import LOOKED_AT, Seen
from zerolab.course.reading import factors

BEGINS = dict(zip(NAMES, accumulate(NAMES.values(), initial=0), strict=False))  # where a parameter begins


class Piece(NamedTuple):
    """A shard, or of parameters by name the shard of one of them: its owner, its name, and its elements."""

    owner: int
    name: str
    cut: slice

    def __str__(self) -> str:
        return f"rank {self.owner}'s shard{f' of {self.name}' * bool(self.name)}"


class Step(NamedTuple):
    """A step before which all parameters are right, and after which they are not.

    Attributes:
        case, ended: the case, and what each rank saw of it.
        number: 0 or 1.
        before: the parameters before the step, on all ranks.
        after: those after it, by rank.
        want: those that are right after it.
        update_before: the right update of the step before, or zeros.
    """

    case: Case
    ended: Sequence[Seen]
    number: int
    before: torch.Tensor
    after: Tensors
    want: torch.Tensor
    update_before: torch.Tensor

    def got(self, piece: Piece) -> torch.Tensor:
        """The owner's update of its shard."""
        return (self.after[piece.owner] - self.before)[piece.cut]

    def right(self, piece: Piece) -> torch.Tensor:
        """What it should have been."""
        return (self.want - self.before)[piece.cut]

    def wrong(self, piece: Piece) -> bool:
        return not close(self.got(piece), self.right(piece))


def first_wrong(case: Case, ended: Sequence[Seen], right: Callable[[Case], Tensors]) -> Step | None:
    """The first step that is wrong on any rank, if it is among the first two."""
    before, update = start(), torch.zeros_like(start())
    for number in range(LOOKED_AT):
        want = right(case._replace(steps=number + 1))[0]
        after = [each.after[number] for each in ended]
        if not all(close(flat, want) for flat in after):
            return Step(case, ended, number, before, after, want, update)
        before, update = want, want - before
    return None


def pieces(case: Case, by_name: bool) -> list[Piece]:
    """Each shard; `by_name`: of each parameter."""
    if not by_name:
        return [Piece(owner, "", chunk(owner, case.ranks)) for owner in range(case.ranks)]
    return [
        Piece(owner, name, slice(BEGINS[name] + cut.start, BEGINS[name] + cut.stop))
        for name, size in NAMES.items()
        for owner, cut in enumerate(ring.chunks(size, case.ranks))
    ]


def gradients(step: Step) -> list[Tensors]:
    """By rank and micro-batch, the gradient at the parameters that the step begins with."""
    world = Lockstep(step.case.ranks)
    ranks = range(step.case.ranks)
    return [[world.gradient(batch, step.before) for batch in batches(step.case, rank)] for rank in ranks]


def counts(step: Step, piece: Piece) -> torch.Tensor | None:
    """By rank and micro-batch, how many times what it should a gradient counts in a shard's first update.

    None where the update is no sum of the gradients.
    """
    parts = {name: -LR * gradient[piece.cut] for name, gradient in _parts(step, "")}
    return _table(step, piece, parts)


def counts_of_both(step: Step, piece: Piece) -> torch.Tensor | None:
    """The same of a second update, of both steps' gradients: those of the first step come first."""
    first = step._replace(before=start())
    parts = {name: -LR * MOMENTUM * gradient[piece.cut] for name, gradient in _parts(first, "first ")}
    parts |= {name: -LR * gradient[piece.cut] for name, gradient in _parts(step, "")}
    return _table(step, piece, parts)


def _parts(step: Step, which: str) -> Iterator[tuple[str, torch.Tensor]]:
    for rank, own in enumerate(gradients(step)):
        for micro, gradient in enumerate(own):
            yield f"{which}rank {rank}, micro-batch {micro}", gradient


def _table(step: Step, piece: Piece, parts: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """From the elements that are wrong alone, because what they are made of may not hold for the others."""
    got, right = step.got(piece), step.right(piece)
    wrong = wrong_elements(got, right) if step.wrong(piece) else torch.arange(len(got))
    found = factors(got[wrong], right[wrong], [{name: part[wrong] for name, part in parts.items()}])
    if found is None:
        return None
    ratios = torch.tensor([have / should for have, should in zip(*(f.values() for f in found), strict=True)])
    return ratios.view(-1, step.case.ranks, step.case.micro_batches).squeeze(0)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.shape == want.shape and torch.allclose(got, want, rtol=1e-6, atol=1e-9)


def wrong_elements(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Their places."""
    return (~torch.isclose(got, want, rtol=1e-6, atol=1e-9)).nonzero().flatten()
