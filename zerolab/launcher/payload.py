"""Turns a function and its arguments into bytes, by value, and says which of them cannot be."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle


def pickle_payload(fn: Callable, args: tuple, kwargs: dict) -> bytes:
    """The pickled call. Functions and classes of the caller's main module travel by value.

    Raises: TypeError that names the argument, or the variable that the function uses, which cannot be
    pickled.
    """
    try:
        return cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:
        names = [name for name, value in _parts(fn, args, kwargs) if not _pickles(value)]
        raise TypeError(
            f"launch cannot send {' and '.join(names) or 'the call'} to another process ({error}); "
            "create it inside the function, or pass what it is made from"
        ) from error


def _parts(fn: Callable, args: tuple, kwargs: dict) -> Iterator[tuple[str, Any]]:
    """Every piece of the call with the name a reader would give it."""
    for index, value in enumerate(args):
        yield f"argument {index} (a {type(value).__name__})", value
    for name, value in kwargs.items():
        yield f"argument {name!r} (a {type(value).__name__})", value
    if inspect.isfunction(fn):
        used = inspect.getclosurevars(fn)
        for name, value in (used.nonlocals | used.globals).items():
            yield f"the variable {name!r} (a {type(value).__name__}) that {fn.__name__} uses", value
    else:
        yield f"fn (a {type(fn).__name__})", fn


def _pickles(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
