"""Lesson 09: values that are right for other elements, or are those of before the step."""

from collections.abc import Sequence

import torch

from zerolab.course.lessons.incident_room.room import NAMES, Case
from zerolab.course.lessons.incident_room.updates.steps import Piece, Step, close, pieces, wrong_elements
from zerolab.course.reading import coefficients


def span(elements: Sequence[int], case: Case) -> str:
    """Elements that follow each other, in words, with the parameter that they are of."""
    first, last = elements[0], elements[-1]
    said = f"elements {first} to {last}" if last > first else f"element {first}"
    begin = 0
    for name, size in NAMES.items():
        if case.by_name and begin <= first and last < begin + size:
            said += f" (of {name})"
        begin += size
    return said


def shifted(got: torch.Tensor, want: torch.Tensor, case: Case) -> str | None:
    """Whether each wrong element has the update of another, or none."""
    runs = _runs(got, want)
    if runs is None:
        return None
    offsets = {there - here for here, there, _ in runs if there >= 0}
    if len(offsets) == 1 and len(runs) < 4:
        by = offsets.pop()
        return (
            f"each of them gets the gradient of the element {abs(by)} {'before' if by < 0 else 'after'} it. "
            "Parameters and gradients are cut or padded at different places"
        )
    said = []
    for here, there, many in runs[:2]:
        of = f"the gradient of {span([there, there + many - 1], case)}" if there >= 0 else "none"
        said.append(f"{span([here, here + many - 1], case)} get {of}")
    of = ", which are cut of each parameter by itself" * case.by_name
    return f"{', and '.join(said)}. What is reduced is cut at other places than the shards{of}"


def _runs(got: torch.Tensor, want: torch.Tensor) -> list[list[int]] | None:
    """Of the wrong elements: where a run begins, where its values belong (-1 for zeros), and its length.

    None where a value belongs nowhere. No two elements of an update are equal.
    """
    runs: list[list[int]] = []
    for here in wrong_elements(got, want).tolist():
        at = torch.isclose(want, got[here], rtol=1e-6, atol=0).nonzero().flatten().tolist()
        if got[here] and not at:
            return None
        there = at[0] if got[here] else -1
        if runs and _goes_on(runs[-1], here, there):
            runs[-1][2] += 1
        else:
            runs.append([here, there, 1])
    return runs if any(there >= 0 for _, there, _ in runs) else None


def _goes_on(run: list[int], here: int, there: int) -> bool:
    first, belongs, many = run
    return here == first + many and there == (belongs + many if belongs >= 0 else -1)


def gathered(step: Step, by_name: bool) -> str | None:
    """What the ranks have of the others' shards, where each rank's own shard is right after the step."""
    every = pieces(step.case, by_name)
    if any(step.wrong(piece) for piece in every):
        return None
    seen: dict[str, list[tuple[int, Piece]]] = {}
    for rank, flat in enumerate(step.after):
        for piece in every:
            if not close(flat[piece.cut], step.want[piece.cut]):
                seen.setdefault(_instead(step, flat[piece.cut], piece), []).append((rank, piece))
    what, where = next(iter(seen.items()))
    ranks = sorted({rank for rank, _ in where})
    owners = sorted({piece.owner for _, piece in where})
    names = sorted({piece.name for _, piece in where if piece.name})
    of = f" of {names[0]}" if len(names) == 1 and len({each.name for each in every}) > 1 else ""
    who, whose = f"{_ranks(ranks)} {'have' if len(ranks) > 1 else 'has'} {what}", f"{_ranks(owners)}'s"
    if len(ranks) == len(owners) == step.case.ranks:
        who, whose = what, "the others'"
    when = "second" if step.number else "first"
    return (
        f"after the {when} step each rank has its own new shard{of}, and {who} in the place of {whose}: "
        "all-gather the new shards after each update"
    )


def _ranks(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _instead(step: Step, got: torch.Tensor, piece: Piece) -> str:
    """What a rank has where it should have another rank's new shard."""
    if close(got, step.before[piece.cut]):
        return "the values of before the update"
    if not got.any():
        return "zeros"
    for other in pieces(step.case, bool(piece.name)):
        if close(got, step.want[other.cut]):
            return f"{other}"
    return "other values"


def added_up(step: Step) -> str | None:
    """Whether all parameters, and not the updates alone, are multiplied or added up."""
    parts = {"before": step.before, "update": step.want - step.before}
    found = [coefficients(flat, parts) for flat in step.after]
    pairs = {tuple(round(value, 4) for value in each.values()) if each else None for each in found}
    if len(pairs) != 1 or (pair := pairs.pop()) is None or abs(pair[0] - 1) < 1e-4:
        return None
    old, new = pair
    said = f"after the step all parameters are {old:.3g} times the old ones plus {new:.3g} times the update"
    if abs(old - step.case.ranks) < 1e-4:
        return f"{said}: the ranks' whole parameters are added up. Gather the shards, and add nothing"
    return f"{said}: the parameters themselves are scaled, as with weight decay or a division"
