"""Lesson 04's exercise on slices: describe wrong slices that no known mistake explains.

Which slices are wrong, what these have in common, and which element has no owner or several.
"""

from collections.abc import Callable, Mapping
from typing import Any

from zerolab.course.attempts import Odd
from zerolab.course.lessons.zero_stage_1.cuts import CASES, MISTAKES, Case, Slices, inside, plain
from zerolab.course.lessons.zero_stage_1.ends import At, places
from zerolab.course.lessons.zero_stage_1.where import only_where

# fmt: off
SLICES: Mapping[str, Callable[[At], bool]] = {
    "the parameter begins exactly where the shard begins": lambda a: a.offset == a.first,
    "the parameter ends exactly where the shard ends": lambda a: a.offset + a.size == a.last,
    "the shard lies inside the parameter":
        lambda a: a.offset < a.first and a.last < a.offset + a.size,
    "the shard begins inside the parameter": lambda a: 0 < a.first - a.offset < a.size,
    "the shard ends inside the parameter": lambda a: 0 < a.last - a.offset < a.size,
    "the whole parameter lies in the shard":
        lambda a: a.first <= a.offset and a.offset + a.size <= a.last,
    "the parameter ends before the shard begins": lambda a: a.offset + a.size <= a.first,
    "the parameter begins behind the end of the shard": lambda a: a.last <= a.offset,
    "the rank owns padding alone": lambda a: a.first >= a.case.numel,
    "the shard ends with padding": lambda a: a.last > a.case.numel,
    "there is one rank": lambda a: a.case.world_size == 1,
    "rank is 0": lambda a: a.case.rank == 0,
    "rank is that of the last rank": lambda a: a.case.rank == a.case.world_size - 1,
    "rank is above 0": lambda a: a.case.rank > 0,
    "world_size divides numel": lambda a: not a.case.numel % a.case.world_size,
    "world_size does not divide numel": lambda a: bool(a.case.numel % a.case.world_size),
    "the parameter is the first one": lambda a: a.offset == 0,
    "the parameter is the last one": lambda a: a.offset + a.size == a.case.numel,
    "there are more ranks than parameters": lambda a: a.case.world_size > len(a.case.sizes),
}
# fmt: on


def described(answers: Mapping[Case, Any], case: Case) -> str:
    """What is wrong with the slices, which of them are, and the first one."""
    said = [_owners(answers, case), _length(case, answers[case]), _first_difference(case, answers[case])]
    return "; ".join(filter(None, [*said, _in_common(answers)]))


def _in_common(answers: Mapping[Case, Any]) -> str | None:
    """What the wrong slices have in common, and no right one has."""
    slices = {
        (case, number): (at, pair == right)
        for case in CASES
        if not isinstance(answers[case], Odd) and len(answers[case]) == len(case.sizes)
        for number, (at, pair, right) in enumerate(
            zip(places(case), answers[case], inside(case), strict=True)
        )
    }
    wrong = [at for at, right in slices.values() if not right]
    where = only_where(SLICES, wrong, [at for at, right in slices.values() if right])
    return where and f"slices are wrong {where}"


def nothing_inside(answers: Mapping[Case, Any], wrong: list[Case]) -> str | None:
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
            "all slices of ranks above 0 are empty. Perhaps the elements that belong to the ranks before "
            "count as if they filled this rank's shard: count only what lies inside the shard"
        )
    return None


def beyond(answers: Mapping[Case, Any], case: Case) -> str | None:
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


def never_cut(answers: Mapping[Case, Any]) -> str | None:
    """Whether every parameter goes to a rank as a whole, or not at all, and to which rank it goes."""
    whole = lambda case, own: all(pair in ((0, 0), (0, n)) for pair, n in zip(own, case.sizes, strict=False))
    if any(isinstance(own, Odd) or not whole(case, own) for case, own in answers.items()):
        return None
    if all(any(pair[1] for pair in own) == (case.rank == 0) for case, own in answers.items()):
        return (
            "rank 0 owns all elements, and no other rank owns any: each rank owns numel / world_size of "
            "them. Are rank and world_size exchanged?"
        )
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
    return (
        f"rank {case.rank}'s slices have {has} elements together, and its shard holds {right} elements of "
        "parameters"
    )


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
                return f"{has} element {element} of parameter {place}: each element has one owner"
    return None


def _first_difference(case: Case, got: Slices) -> str:
    pairs = enumerate(zip(got, inside(case), strict=True))
    place, (mine, right) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
    return f"the slice of parameter {place} is {mine}, and right is {right}"
