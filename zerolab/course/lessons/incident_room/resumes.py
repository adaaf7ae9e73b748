"""Lesson 09: where the job ends after a resume, and what is wrong with a momentum that was loaded.

Each element of it is looked up in the one that was saved.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from zerolab.course.lessons.incident_room.lockstep import Lockstep, Tensors, mean
from zerolab.course.lessons.incident_room.readings import close
from zerolab.course.lessons.incident_room.room import PSI, Case, batches

Owned = Callable[[int, int], Tensors]
"""From the number of ranks and a rank: which elements of all belong to each of its shards, -1 for padding."""


def resumed(case: Case, at_resume: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Tensors:
    """Where the ranks end after a resume at which `at_resume` makes another momentum of the saved one."""
    first = _before_resume(case)
    second = Lockstep(case.resumed_on, first.flats[0], at_resume(first.momentum))
    data = [batches(case, rank) for rank in range(case.resumed_on)]
    for _ in range(case.steps):
        second.step(data, mean)
    return second.flats


def momentum_saved(case: Case) -> torch.Tensor:
    """The whole momentum at the resume."""
    return _before_resume(case).momentum


def _before_resume(case: Case) -> Lockstep:
    world = Lockstep(case.ranks)
    data = [batches(case, rank) for rank in range(case.ranks)]
    for _ in range(case.steps):
        world.step(data, mean)
    return world


def momentum_told(case: Case, owned: Owned, loaded: Sequence[Any], files: Sequence[Any]) -> str | None:
    """The first element of the momentum that is not the one that was saved, after a load; by rank."""
    whole = momentum_saved(case)
    for rank, buffers in enumerate(loaded):
        places = owned(case.resumed_on, rank)
        if len(buffers) != len(places) or None in buffers:
            return None
        for number, (got, place) in enumerate(zip(buffers, places, strict=True)):
            name = f"rank {rank}'s momentum" + (f" of unit {number}" if len(places) > 1 else "")
            if len(got) != len(place):
                return f"after load {name} has {len(got)} elements, and its shard has {len(place)}"
            wrong = [at for at, which in enumerate(place.tolist()) if which >= 0]
            wrong = [at for at in wrong if not close(got[at], whole[place[at]])]
            if wrong:
                return f"after load {name} is wrong: {_misplaced(got, place, wrong, whole, files)}"
    return None


def _misplaced(
    got: torch.Tensor, place: torch.Tensor, wrong: Sequence[int], whole: torch.Tensor, files: Sequence[Any]
) -> str:
    """What stands at the first wrong element, what belongs there, and where that was saved."""
    at, found = wrong[0], [_find(got[each], whole) for each in wrong]
    right = int(place[at])
    what = f"is {float(got[at]):.4g}, which no rank had" if found[0] is None else f"is element {found[0]}"
    if not got[at]:
        what = "is 0"
    said = f"its element {at} {what}, and element {right} of all {PSI} belongs there"
    off = {None if each is None else each - int(place[w]) for each, w in zip(found, wrong, strict=True)}
    if len(off) == 1 and None not in off and len(wrong) > 1:
        by = off.pop()
        way = "late" if by > 0 else "early"
        said += f", so what was read begins {abs(by)} element{'s' * (abs(by) > 1)} too {way} from there on"
    saved = [
        f"files[{number}]"
        for number, file in enumerate(files)
        if _find(whole[right], _flat(file)) is not None
    ]
    if not saved:
        return f"{said}. No file has that: save has to leave out nothing"
    return f"{said}. {' and '.join(saved) if len(saved) < 3 else 'Every one of several files'} has it"


def _flat(file: Any) -> torch.Tensor:
    """All numbers of what save returned."""
    leaves = [leaf.flatten().double() for leaf in tree_leaves(file) if isinstance(leaf, torch.Tensor)]
    return torch.cat(leaves) if leaves else torch.empty(0)


def _find(value: torch.Tensor, values: torch.Tensor) -> int | None:
    """The place of a value, if it is among them. No two elements of a momentum are equal."""
    same = (values - value).abs() < 1e-12
    return int(same.nonzero()[0]) if value and same.any() else None
