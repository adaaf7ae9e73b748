"""Lesson 04's exercises: tell which cases go wrong, by what these have in common and no right one has."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

Thing = TypeVar("Thing")


def only_where(
    features: Mapping[str, Callable[[Thing], bool]], wrong: Sequence[Thing], right: Sequence[Thing]
) -> str | None:
    """Return where things go wrong, in words: one feature, or two, that all wrong ones have and no right one.

    None where no feature tells them apart, or where there are no right ones to tell from.
    """
    if not right:
        return None
    shared = {name: has for name, has in features.items() if all(has(each) for each in wrong)}
    for count in (1, 2):
        for names in combinations(shared, count):
            if not any(all(shared[name](each) for name in names) for each in right):
                return f"those where {' and '.join(names)}"
    return None
