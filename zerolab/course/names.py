"""The names that a reader's function uses, which tell what it asks for in place of its arguments."""

from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

_OF_THE_JOB = {"get_rank": "rank", "get_world_size": "world_size"}


def names_in(fn: Callable) -> set[str]:
    """Return the global names and attributes in a function's code, and in that of the functions it calls."""
    return {name for code in codes_of(fn) for name in code.co_names}


def codes_of(thing: Any) -> Iterator[CodeType]:
    """Yield the code of a function or of a class's methods, of functions within, and of those that it calls.

    The last are those of its own module, and theirs are not followed.
    """
    if isinstance(thing, type):
        for each in vars(thing).values():
            yield from codes_of(each)
    elif isinstance(thing, FunctionType):
        yield from codes_of(thing.__code__)
        for name in thing.__code__.co_names:
            other = thing.__globals__.get(name)
            if isinstance(other, FunctionType) and other.__module__ == thing.__module__ and other != thing:
                yield from codes_of(other.__code__)
    elif isinstance(thing, CodeType):
        yield thing
        for each in thing.co_consts:
            yield from codes_of(each)


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
