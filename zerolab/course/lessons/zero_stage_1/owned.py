"""Lesson 04's exercise on shards: which slice of each parameter a rank owns."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from zerolab.course.attempts import Odd, attempt
from zerolab.course.exercise import graded
from zerolab.course.lessons.zero_stage_1.cuts import CASES, MISTAKES, Case, Slices, inside, plain
from zerolab.course.lessons.zero_stage_1.solution import owned_slices

HINTS = (
    "a shard has ceil(numel / world_size) elements of the padded buffer. Compute where yours begins and "
    "ends.",
    "a parameter begins in the buffer where the ones before it end. Subtract that offset from the ends of "
    "your shard to count from the parameter's own first element.",
    "cut both ends off at the parameter: start is max(first - offset, 0), and stop is min(last - offset, "
    "size). If stop is not above start, the slice is (0, 0).",
)


@graded(
    "Your slices are right for every rank: each element of each parameter has one owner.",
    call="owned_slices(sizes, world_size, rank)",
    hints=HINTS,
    solution=[owned_slices],
)
def check_owned(fn: Callable) -> str | None:
    """Ask fn(sizes, world_size, rank) for the slices of every rank of nine models; name what is wrong."""
    outcome = attempt(_answers, [(fn,)])
    if outcome.failure:
        return outcome.failure.replace("rank 0", "your function").replace(", not waiting", "")
    answers = dict(zip(CASES, outcome.values[0], strict=True))
    if all(answers[case] == tuple((stop, start) for start, stop in inside(case)) for case in CASES):
        return "that is (stop, start): return (start, stop)"
    answers = {case: own if isinstance(own, Odd) else tuple(plain(own)) for case, own in answers.items()}
    if set(answers.values()) == {Odd("NoneType", "")}:
        return "not written yet: the function returned None"
    wrong = [case for case in CASES if answers[case] != tuple(inside(case))]
    return f"{_mistake(answers, wrong)} (seen with {wrong[0]})" if wrong else None


def _answers(fn: Callable) -> list[tuple | Odd]:
    """In the worker: what fn returns for every case, each time as pairs of numbers."""
    return [_slices(fn(list(case.sizes), case.world_size, case.rank)) for case in CASES]


def _slices(value: Any) -> tuple | Odd:
    value = value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else value
    if not isinstance(value, list | tuple):
        return Odd(type(value).__name__, "" if value is None else repr(value)[:60])
    pairs = [_pair(each) for each in value]
    odd = [pair for pair in pairs if isinstance(pair, Odd)]
    return odd[0] if odd else tuple(pair for pair in pairs if not isinstance(pair, Odd))


def _pair(value: Any) -> tuple[int, int] | Odd:
    """Return a slice as (start, stop); a slice, a range, and whole numbers of any type are taken, too."""
    if isinstance(value, slice | range) and value.step in (None, 1):
        value = (value.start or 0, value.stop)
    try:
        start, stop = value
        if int(start) == start and int(stop) == stop:
            return int(start), int(stop)
        return Odd("a slice that is not of whole numbers,", repr(value)[:60])
    except (TypeError, ValueError):
        pass
    return Odd(f"{type(value).__name__} for a parameter", repr(value)[:60])


def _mistake(answers: Mapping[Case, Any], wrong: list[Case]) -> str:
    """Return the mistake behind all answers, or all wrong ones; or an element without exactly one owner."""
    case, got = wrong[0], answers[wrong[0]]
    if isinstance(got, Odd):
        said = " ".join(filter(None, got[:2])).replace("NoneType", "None")
        return f"your function returned {said}: return a list with one (start, stop) for each parameter"
    if nothing := _nothing_inside(answers, wrong):
        return nothing
    for cases in (CASES, wrong):
        fits = [why for why, f in MISTAKES.items() if all(answers[c] == tuple(plain(f(c))) for c in cases)]
        if fits:
            return ", or else ".join(fits)
    if len(got) != len(case.sizes):
        return f"your list has {len(got)} slices for {len(case.sizes)} parameters: return one for each"
    first = _first_difference(case, got)
    return (
        _beyond(answers, case)
        or _never_cut(answers)
        or _owners(answers, case)
        or "; ".join(filter(None, (_length(case, got), first)))
    )


def _nothing_inside(answers: Mapping[Case, Any], wrong: list[Case]) -> str | None:
    """Whether all wrong answers are of empty slices alone, and what these cases have in common."""
    lists = [[] if isinstance(answers[case], Odd) else [*answers[case]] for case in wrong]
    if any(not pairs or any(pair != (0, 0) for pair in pairs) for pairs in lists):
        return None
    right = [[(pair, size) for pair, size in zip(inside(c), c.sizes, strict=True) if pair[1]] for c in wrong]
    if all(len(own) == 1 and own[0][0][0] > 0 for own in right):
        return (
            "where the shard lies inside one parameter, all slices are empty: there both ends have to be cut "
            "off at once, the start at first - offset and the stop at last - offset"
        )
    if all(case.rank > 0 for case in wrong):
        return (
            "all slices of ranks above 0 are empty: the elements that belong to the ranks before count as if "
            "they filled this rank's shard. Count only what lies inside the shard"
        )
    return None


def _beyond(answers: Mapping[Case, Any], case: Case) -> str | None:
    """A slice that begins before its parameter or ends behind it, and what is wrong beside that."""
    ends = zip(answers[case], case.sizes, strict=True)
    over = [
        (place, pair, size) for place, (pair, size) in enumerate(ends) if min(pair) < 0 or max(pair) > size
    ]
    if not over:
        return None
    place, pair, size = over[0]
    cut = {each: tuple(_cut_off(each, slices)) for each, slices in answers.items()}
    besides = [why for why, f in MISTAKES.items() if all(cut[c] == tuple(plain(f(c))) for c in CASES)]
    right = all(cut[each] == tuple(inside(each)) for each in CASES)
    said = f"the slice of parameter {place} is {pair}, and the parameter has the elements 0 to {size}: cut "
    said += f"both ends off at 0 and at {size}"
    return said + (
        ". That makes all slices right" if right else f". Besides, {besides[0]}" if besides else ""
    )


def _cut_off(case: Case, slices: Any) -> Slices:
    """The part of each slice that its parameter has; nothing for an answer that is no list of slices."""
    if isinstance(slices, Odd) or len(slices) != len(case.sizes):
        return []
    pairs = zip(slices, case.sizes, strict=True)
    return plain((min(max(start, 0), size), min(max(stop, 0), size)) for (start, stop), size in pairs)


def _never_cut(answers: Mapping[Case, Any]) -> str | None:
    """Whether every parameter goes to a rank as a whole, or not at all, and to which rank it goes."""
    whole = lambda case, own: all(pair in ((0, 0), (0, n)) for pair, n in zip(own, case.sizes, strict=False))
    if any(isinstance(own, Odd) or not whole(case, own) for case, own in answers.items()):
        return None
    owner = {"first": lambda at, size: at, "last": lambda at, size: at + size - 1}
    by = [
        f", here to the rank whose shard has its {word} element"
        for word, element in owner.items()
        if all(
            own == tuple(
                (0, size) if case.shard.start <= element(at, size) < case.shard.stop else (0, 0)
                for at, size in zip(case.offsets, case.sizes, strict=True)
            )
            for case, own in answers.items()
        )
    ]  # fmt: skip
    return (
        f"every parameter is dealt out whole{by[0] if by else ''}, so the ranks' parts are not equal: a cut "
        "may go through the middle of a parameter, and each rank owns the part that is in its shard"
    )


def _length(case: Case, got: Slices) -> str | None:
    """Return whether the rank owns too many elements or too few."""
    has, right = (sum(stop - start for start, stop in slices) for slices in (got, inside(case)))
    if has == right:
        return None
    return f"rank {case.rank} owns {has} elements in all, and {right} of its shard are of parameters"


def _owners(answers: Mapping[Case, Any], case: Case) -> str | None:
    """Return the first element of a parameter that no rank owns, or more than one."""
    ranks = [answers[case._replace(rank=rank)] for rank in range(case.world_size)]
    if any(isinstance(own, Odd) or len(own) != len(case.sizes) for own in ranks):
        return None
    for place, size in enumerate(case.sizes):
        for element in range(size):
            own = [r for r, slices in enumerate(ranks) if slices[place][0] <= element < slices[place][1]]
            if len(own) != 1:
                has = f"the ranks {own} all own" if own else "no rank owns"
                return (
                    f"{has} element {element} of parameter {place}: each element has one owner. A parameter "
                    "begins where the sizes of all before it end, also of those that you skip"
                )
    return None


def _first_difference(case: Case, got: Slices) -> str:
    pairs = enumerate(zip(got, inside(case), strict=True))
    place, (mine, right) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
    return f"the slice of parameter {place} is {mine}, and right is {right}"
