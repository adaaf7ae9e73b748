"""The names that a reader's function uses, which tell what it asks for in place of its arguments."""

from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

_OF_THE_JOB = {"get_rank": "rank", "get_world_size": "world_size"}


def names_in(fn: Callable) -> set[str]:
    """Return the global names and attributes in the code of a function, and of functions within it."""
    return set(_of_code(getattr(fn, "__code__", None)))


def _of_code(code: CodeType | None) -> Iterator[str]:
    if code is None:
        return
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _of_code(each)


def asks_the_job(fn: Callable, by_rank: Iterable[tuple[Any, Any]]) -> str | None:
    """Return what to say of a function that asks for its rank, which is an argument.

    `by_rank`: by case and rank, the case without the rank, and the answer. Such a function gives all ranks of
    a case one answer.
    """
    first: dict[Any, Any] = {}
    if any(str(first.setdefault(case, answer)) != str(answer) for case, answer in by_rank):
        return None
    asked = [name for name in _OF_THE_JOB if name in names_in(fn)]
    if not asked:
        return None
    calls = " and ".join(f"dist.{name}()" for name in asked)
    arguments = " and ".join(_OF_THE_JOB[name] for name in asked)
    return (
        f"your function calls {calls}. The check calls it in one process, once for each rank, so use the "
        f"argument{'s' * (len(asked) > 1)} {arguments}"
    )
