"""Lesson 09: what the first wrong element of a loaded momentum is, and where the right one was saved."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from zerolab.course.lessons.incident_room.loaded.found import ZERO, Shard, in_files, look_up
from zerolab.course.lessons.incident_room.room import PSI


def told(
    name: str,
    shards: Sequence[Shard],
    wrong: Shard,
    files: Sequence[Any],
    whole: torch.Tensor,
    flat: torch.Tensor,
) -> str:
    """Of the first shard that is wrong: its first wrong element. `flat`: the parameters, which it may be."""
    at = wrong.wrong[0]
    there, right = wrong.found[at], wrong.belongs[at]
    what = f"element {there}" if there >= 0 else _unknown(wrong, at, files, flat)
    said = f"{name} is wrong: its element {at} is {what}, and element {right} of all {PSI} belongs there"
    return f"{said}{_run(wrong)}{_where_saved(wrong, right, files, whole)}{_unit(shards, wrong, there)}"


def _run(shard: Shard) -> str:
    """How many elements too late or too early it was read; or from where on it is 0."""
    said, wrong = "", shard.wrong
    off = {shard.found[at] - shard.belongs[at] for at in wrong}
    if len(off) == 1 and len(wrong) > 1 and shard.found[wrong[0]] >= 0:
        by = off.pop()
        way = "late" if by > 0 else "early"
        said = f", so what was read begins {abs(by)} element{'s' * (abs(by) > 1)} too {way} from there on"
    if 0 < wrong[0] < len(shard.found) and set(shard.found[wrong[0] :]) == {ZERO}:
        said += f". The first {wrong[0]} elements are right, and all behind them are 0"
    return said


def _where_saved(shard: Shard, right: int, files: Sequence[Any], whole: torch.Tensor) -> str:
    """The files that have the right element; and whether the shard has elements of one file alone."""
    elements = in_files(files, whole)
    has = [number for number, own in enumerate(elements) if right in own]
    if not has:
        return ". No file has that: save has to leave out nothing"
    if len(has) == len(files) > 1:
        return ". That is in each file"
    said = f". That is in {' and '.join(f'files[{number}]' for number in has)}"
    sources = [number for number, own in enumerate(elements) if set(own) & set(shard.found) - {ZERO}]
    if len(has) > 1 or len(files) == 1 or len(sources) > 1:
        return said  # the rank has elements of several files, so these were put together
    return (
        f"{said}{_ranges(files[has[0]], whole)}. Put the files together before you cut, or save all in each"
    )


def _ranges(file: Any, whole: torch.Tensor) -> str:
    """Which elements a file has, where each of its tensors has a range of them."""
    tensors = [leaf for leaf in tree_leaves(file) if isinstance(leaf, torch.Tensor)]
    found = [look_up(leaf.double(), whole) for leaf in tensors]
    if any(own != list(range(own[0], own[0] + len(own))) for own in found if own):
        return ""  # zeros or padding stand between
    return ", which has " + " and ".join(f"elements {own[0]} to {own[-1]}" for own in found if own) + " alone"


def _unit(shards: Sequence[Shard], wrong: Shard, there: int) -> str:
    """Of which other unit an element is."""
    unit = next((shard.unit for shard in shards if there >= 0 and there in shard.belongs), wrong.unit)
    return f". Element {there} is of unit {unit}" if unit != wrong.unit else ""


def _unknown(shard: Shard, at: int, files: Sequence[Any], flat: torch.Tensor) -> str:
    """What a loaded number is that is no element of the momentum."""
    if shard.found[at] == ZERO:
        return "the number 0"
    value = shard.values[at]
    if bool(((flat - value).abs() < 1e-12).any()):
        return f"parameter {int((flat - value).abs().argmin())}, and no momentum"
    plain = [file for file in files if isinstance(file, torch.Tensor) and file.dim() == 1]
    same = [file[at] for file in plain if at < len(file)]
    follow = ", which follow each other and do not overlap" * (sum(map(len, plain)) == PSI)
    for word, number in (("sum", sum(same)), ("mean", sum(same) / max(1, len(same)))):
        if len(same) == len(files) and abs(float(value - number)) < 1e-9:
            return f"the {word} of element {at} of all files{follow}"
    return f"{float(value):.4g}, which no rank had"
