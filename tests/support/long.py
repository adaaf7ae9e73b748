"""Marks values of a parametrized test ``long``: ``./zero test`` then runs the test with the others only."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def long_where(condition: Callable[[Any], bool], reason: str, values: Iterable) -> list:
    """`values` for ``parametrize``, of which those that meet `condition` are marked long, with the reason.

    A tuple has the values of several names.
    """
    mark = pytest.mark.long(reason)
    several = lambda each: each if isinstance(each, tuple) else (each,)
    return [pytest.param(*several(each), marks=mark) if condition(each) else each for each in values]
