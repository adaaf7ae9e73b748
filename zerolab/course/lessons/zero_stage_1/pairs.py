"""Lesson 04's exercise on slices: read what a reader's function returned as one (start, stop) each.

A slice, a range and whole numbers of any type are taken. Anything else is described, and sometimes one can
see what was returned instead: the slices of all ranks, or lengths.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from zerolab.course.attempts import Odd
from zerolab.course.lessons.zero_stage_1.cuts import Case, inside

ONE_EACH = "return a list with one (start, stop) for each parameter"
NONE = "NoneType"


def pairs_of(value: Any, case: Case) -> tuple | Odd:
    """Return the pairs of numbers in an answer, or what the answer is instead."""
    value = value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else value
    if value is None:
        return Odd(NONE, "")
    if not isinstance(value, list | tuple):
        return Odd(f"your function returned {type(value).__name__} {repr(value)[:60]}: {ONE_EACH}", "")
    pairs = [_pair(each) for each in value]
    odd = [pair for pair in pairs if isinstance(pair, str)]
    if odd:
        return Odd(_instead(value, case) or f"your function returned {odd[0]}", "")
    return tuple(pairs)


def _pair(value: Any) -> tuple[int, int] | str:
    """Return a slice as (start, stop), or what is there instead."""
    if isinstance(value, slice | range) and value.step in (None, 1):
        value = (value.start or 0, value.stop)
    if value is None:
        return "None for a parameter: an empty slice is (0, 0)"
    try:
        start, stop = value
        if int(start) == start and int(stop) == stop:
            return int(start), int(stop)
        return f"a slice that is not of whole numbers, {repr(value)[:60]}: {ONE_EACH}"
    except (TypeError, ValueError):
        return f"{type(value).__name__} for a parameter, {repr(value)[:60]}: {ONE_EACH}"


def _instead(value: Sequence[Any], case: Case) -> str | None:
    """Return what an answer is that is no list of pairs, if its numbers tell."""
    right, numel = inside(case), len(case.sizes)
    starts, stops = zip(*right, strict=True)
    shard = case.shard
    known = {
        f"the slices of all ranks: return those of rank {case.rank} alone, the rank that was asked for": [
            inside(case._replace(rank=rank)) for rank in range(case.world_size)
        ],
        f"the starts and stops in one flat list: {ONE_EACH}": [end for pair in right for end in pair],
        f"all starts, and then all stops: {ONE_EACH}": [starts, stops],
        f"the range of the shard in the buffer: {ONE_EACH}": [shard.start, shard.stop],
        f"lengths: {ONE_EACH}": [stop - start for start, stop in right],
        f"the numbers of the elements: {ONE_EACH}": [[*range(*pair)] for pair in right],
    }
    plain = _lists(value)
    for what, numbers in known.items():
        if plain == _lists(numbers):
            return f"your function returned {what}"
    triples = [each for each in value if isinstance(each, list | tuple) and len(each) == 3]
    if len(triples) == len(value):
        last = [tuple(each[1:]) for each in value]
        missing = "" if len(value) == numel else ". Keep an empty slice where the rank owns nothing"
        if last in (right, [pair for pair in right if pair != (0, 0)]):
            return f"each slice has a number in front of start and stop, {value[0]}: {ONE_EACH}{missing}"
    return None


def _lists(value: Any) -> Any:
    """The same with lists for tuples, so that they can be compared."""
    return [_lists(each) for each in value] if isinstance(value, list | tuple) else value
