"""Lesson 09: in words, what is wrong with a momentum that the ranks loaded."""

from collections.abc import Sequence
from typing import Any

import torch

from zerolab.course.lessons.incident_room.loaded import Owned, element
from zerolab.course.lessons.incident_room.loaded.cuts import followed
from zerolab.course.lessons.incident_room.loaded.found import UNKNOWN, ZERO, Shard, in_files, look_up
from zerolab.course.lessons.incident_room.lockstep import Lockstep
from zerolab.course.lessons.incident_room.room import Case
from zerolab.course.lessons.incident_room.runs import Seen


def momentum_told(
    case: Case, owned: Owned, ended: Sequence[Seen], files: Sequence[Any], saved: Lockstep
) -> str | None:
    """What is wrong after a load: with the parameters, or with the momentum of the first shard that is.

    `saved`: the job as it was before.
    """
    if told := _of_parameters(ended, saved.momentum):
        return told
    shards = _shards(case, owned, ended, saved.momentum)
    if isinstance(shards, str):
        return shards
    wrong = [shard for shard in shards if shard.wrong]
    if not wrong:
        return "after load the parameters and the momentum are right, and after the next steps they are not"
    return (
        _scaled(shards, files, saved.momentum)
        or _padding_in_front(shards, wrong)
        or _padding_of_units_before(shards, wrong)
        or _of_one_rank(shards, wrong)
        or _cut(case, shards, files, saved.momentum)
        or element.told(_name(shards, wrong[0]), shards, wrong[0], files, saved.momentum, saved.flats[0])
    )


def _shards(case: Case, owned: Owned, ended: Sequence[Seen], whole: torch.Tensor) -> list[Shard] | str:
    """All shards' momentum, or why it cannot be compared."""
    found = []
    for rank, each in enumerate(ended):
        places = owned(len(ended), rank)
        if len(each.loaded) != len(places):
            many = len(each.loaded)
            return f"after load rank {rank}'s optimizer has {many} shards, and {len(places)} is right"
        for unit, (values, place) in enumerate(zip(each.loaded, places, strict=True)):
            if values is None:
                return f"after load rank {rank}'s optimizer has no momentum: load it into its state"
            if values.dtype != whole.dtype:
                got, want = (str(dtype).removeprefix("torch.") for dtype in (values.dtype, whole.dtype))
                why = ". torch.tensor and torch.zeros make float32, unless they get dtype=torch.float64"
                return (
                    f"after load rank {rank}'s momentum is {got}, and the parameters are {want}"
                    f"{why * (got == 'float32')}"
                )
            if values.numel() != len(place):
                of = f" of unit {unit}" * (len(places) > 1)
                return (
                    f"after load rank {rank}'s momentum{of} has {values.numel()} elements, and its shard has "
                    f"{len(place)}"
                )
            found.append(Shard(rank, unit, values.flatten(), place.tolist(), look_up(values.double(), whole)))
    return found


def _of_parameters(ended: Sequence[Seen], whole: torch.Tensor) -> str | None:
    """Whether load has written to the parameters."""
    for rank, each in enumerate(ended):
        changed = (each.begun != each.given).nonzero().flatten()
        if len(changed):
            there = look_up(each.begun[changed], whole)
            what = "the momentum" if all(place >= 0 for place in there) else "other values"
            return (
                f"load writes {what} into rank {rank}'s parameters, from element {int(changed[0])} on. The "
                'momentum belongs into self.optimizer.state[self.shard]["momentum_buffer"], and load changes '
                "nothing else"
            )
    return None


def _name(shards: Sequence[Shard], shard: Shard) -> str:
    of = f" of unit {shard.unit}" if any(each.unit for each in shards) else ""
    return f"after load rank {shard.rank}'s momentum{of}"


def _scaled(shards: Sequence[Shard], files: Sequence[Any], whole: torch.Tensor) -> str | None:
    """Whether all of it is the right one times a number."""
    got = torch.cat([shard.values for shard in shards])
    place = torch.tensor([each for shard in shards for each in shard.belongs])
    want = torch.where(place >= 0, whole[place.clamp(min=0)], torch.zeros(()))
    factor = float(got @ want / (want @ want))
    if abs(factor) < 1e-9 or not torch.allclose(got, factor * want, rtol=1e-9, atol=1e-12):
        return None
    said = f"after load the momentum is {factor:.3g} times the one that was saved, on all ranks"
    everything = all(len(set(own)) >= len(whole) for own in in_files(files, whole))
    if everything and abs(factor - len(files)) < 1e-6:
        return f"{said}: each of the {len(files)} files has all of it, and load adds them up"
    return f"{said}: take it from the files as it is, and add or divide nothing"


def _by_unit(shards: Sequence[Shard], unit: int) -> tuple[list[int], list[int]]:
    """What belongs into all ranks' shards of a unit, one after the other, and what is there."""
    own = [shard for shard in shards if shard.unit == unit]
    return [e for shard in own for e in shard.belongs], [e for shard in own for e in shard.found]


def _padding_in_front(shards: Sequence[Shard], wrong: Sequence[Shard]) -> str | None:
    """Whether a unit's own padding stands before its momentum, and not behind it."""
    unit = wrong[0].unit
    belongs, found = _by_unit(shards, unit)
    padding = belongs.count(ZERO)
    if not padding or found != [ZERO] * padding + belongs[:-padding]:
        return None
    return (
        f"{_name(shards, wrong[0])} is wrong: the unit's padding, {padding} zeros, stands before its "
        "momentum. Padding is at the end: copy the momentum to the beginning of the padded buffer"
    )


def _padding_of_units_before(shards: Sequence[Shard], wrong: Sequence[Shard]) -> str | None:
    """Whether what belongs there comes as many elements too late as the units before have padding."""
    unit = wrong[0].unit
    belongs, found = _by_unit(shards, unit)
    padding = sum(_by_unit(shards, before)[0].count(ZERO) for before in range(unit))
    rest = len(belongs) - belongs.count(ZERO) - padding
    zeros, then = found[:padding], found[padding : padding + rest]
    if not padding or zeros != [ZERO] * padding or then != belongs[:rest]:
        return None
    return (
        f"{_name(shards, wrong[0])} is wrong: it begins with {padding} zeros, and what belongs there comes "
        f"{padding} element{'s' * (padding > 1)} too late. The units before have {padding} of padding "
        "together, which is saved as if it were momentum. Cut each unit's padding off before you put the "
        "units together"
    )


def _of_one_rank(shards: Sequence[Shard], wrong: Sequence[Shard]) -> str | None:
    """Whether every rank has the shard of one and the same."""
    for owner in {shard.rank for shard in shards}:
        of = {shard.unit: shard for shard in shards if shard.rank == owner}
        if all(_begins(shard.found, of[shard.unit].belongs) for shard in shards):
            return (
                f"{_name(shards, wrong[0])} is wrong: every rank has that of rank {owner}'s shard. Take the "
                "slice that this rank owns"
            )
    return None


def _begins(found: Sequence[int], belongs: Sequence[int]) -> bool:
    many = min(len(found), len(belongs))
    return list(found[:many]) == list(belongs[:many])


def _cut(case: Case, shards: Sequence[Shard], files: Sequence[Any], whole: torch.Tensor) -> str | None:
    """Which files were put together, and where they were cut, where each rank has one shard."""
    if any(shard.unit for shard in shards):
        return None
    elements = in_files(files, whole)
    if not all(elements) or any(UNKNOWN in file for file in elements):
        return None
    cut = followed({shard.rank: shard.found for shard in shards}, elements, len(shards))
    if cut is None:
        return None
    return (
        f"in load {cut}. All files together, in their order, are the whole momentum, and self.mine is the "
        "slice of it that a rank owns now"
    )
