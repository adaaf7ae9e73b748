"""Lesson 10's exercise: ask the reader's function for owners, in a rank and in interpreters of their own."""

import contextlib
import operator
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zerolab.course.attempts import Odd, told
from zerolab.course.hash_seed import may_depend, under_each_seed
from zerolab.course.lessons.whole_matrices.cases import Case, Plan

SECONDS = 3  # that an answer may take
BY_ITSELF = Path(__file__).with_name("by_itself.py")


class Slow(NamedTuple):
    """Where an answer took too long."""

    case: Case


Answer = Plan | Odd | Slow


class _TooLong(BaseException):
    """Raised inside the reader's function. It is no Exception, so no handler of the reader's takes it."""


def answers(fn: Callable, cases: Sequence[Case]) -> tuple[list[Answer], list[Answer]]:
    """In the worker: what fn returns for each case, and once more when all have been asked.

    Where one takes too long, the others are not asked.
    """
    first: list[Answer] = []
    for case in cases:
        first.append(_answer(fn, case))
        if isinstance(first[-1], Slow):
            return [first[-1] for _ in cases], []
    return first, [_answer(fn, case) for case in reversed(cases)][::-1]


def _answer(fn: Callable, case: Case) -> Answer:
    try:
        with _no_longer_than(SECONDS):
            return owners_in(fn(list(case.work), case.world_size))
    except _TooLong:
        return Slow(case)
    except Exception as error:
        raise told(error, case) from None


@contextlib.contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    """Inside the with block: raise when the time is over."""

    def stop(*_):
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def owners_in(value: Any) -> Plan | Odd:
    """Take any sequence of whole numbers, a tensor too."""
    try:
        if not isinstance(value, set | frozenset | dict | str | bytes):
            return [operator.index(each) for each in value]
    except (TypeError, ValueError):
        pass
    numbers = tuple(value) if _is_of_floats(value) else ()
    return Odd(type(value).__name__, "" if value is None else repr(value)[:60], numbers)


def _is_of_floats(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(n, int | float) for n in value)


def by_hash_seed(fn: Callable, cases: Sequence[Case]) -> list[list[Plan]]:
    """The answers in two interpreters whose hash() of a text differs, or nothing where there is no need."""
    if not may_depend(fn):
        return []
    asked = [(list(case.work), case.world_size) for case in cases]
    said = under_each_seed(BY_ITSELF, fn, *asked)
    return [[list(map(int, line.split())) for line in each.splitlines()] for each in said]
