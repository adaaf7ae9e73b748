"""Lesson 04's exercises: tell which cases go wrong, by what these have in common and no right one has."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

Thing = TypeVar("Thing")
FEW = 3  # so many wrong ones show no rule of two features


def only_where(
    features: Mapping[str, Callable[[Thing], bool]], wrong: Sequence[Thing], right: Sequence[Thing]
) -> str | None:
    """Return where things go wrong, in words: "everywhere where", "only where" or None.

    A feature that all wrong ones have and no right one; or one that few right ones have, too; or two features
    that together no right one has.
    """
    if not right:
        return None
    shared = {name: has for name, has in features.items() if all(has(each) for each in wrong)}
    others = {name: sum(has(each) for each in right) for name, has in shared.items()}
    if exact := [name for name, count in others.items() if not count]:
        return f"wherever {exact[0]}, and nowhere else"
    if near := [name for name, count in others.items() if count <= max(len(wrong) - 1, FEW)]:
        return f"only where {near[0]}"
    for names in combinations(shared, 2) if len(wrong) > FEW else ():
        if not any(all(shared[name](each) for name in names) for each in right):
            return f"wherever {' and '.join(names)}, and nowhere else"
    return None
