"""Find what is still in memory: the storages of live tensors, and the names that keep them."""

import gc
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

# A collective's own thread lets go of its tensors a moment after the call has returned.
SETTLES, SETTLE_SECONDS = 3, 0.01
MOST_THINGS = 2000  # that a search for a name looks at


class Alive:
    """The tensors made since this was made and still alive; those of before are not counted.

    Memory: it keeps the earlier storages alive, so that no new one gets the identity of an old one.
    """

    def __init__(self):
        gc.collect()
        self._before = [tensor.untyped_storage() for tensor in _tensors()]
        gc.freeze()  # later looks skip what is there now: a look is short
        self._known = {storage._cdata for storage in self._before}

    def storages(self, leave_out: Iterable[Any] = (), at_least: int = 1) -> dict[int, torch.Tensor]:
        """One tensor for each storage that is new, has so many bytes, and is of no tensor of `leave_out`."""
        known = self._known | {_storage(thing) for thing in leave_out if isinstance(thing, torch.Tensor)}
        found: dict[int, torch.Tensor] = {}
        for look in range(SETTLES):
            time.sleep(SETTLE_SECONDS * bool(look))
            found = {}  # lets go of the last look's tensors
            gc.collect()
            found = {_storage(tensor): tensor for tensor in _tensors() if _storage(tensor) not in known}
            found = {
                key: tensor for key, tensor in found.items() if tensor.untyped_storage().nbytes() >= at_least
            }
            if not found:
                break
        return found


def nbytes(tensors: Mapping[int, torch.Tensor]) -> int:
    """Return the bytes of the storages behind the tensors."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())


def kept_by(tensor: torch.Tensor, **roots: Any) -> str | None:
    """Return the name under which one of `roots` keeps the tensor's storage, such as ``self.history[0]``.

    It looks into attributes, base classes, closures, defaults, globals that a function uses, dicts, lists and
    optimizers.
    """
    wanted = _storage(tensor)
    seen: set[int] = set()
    queue = deque(roots.items())
    while queue and len(seen) < MOST_THINGS:
        name, thing = queue.popleft()
        if id(thing) in seen or isinstance(thing, ModuleType | str | bytes | int | float):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor) and thing.layout is torch.strided and _storage(thing) == wanted:
            return name
        queue += _parts(name, thing)
    return None


def first_name(names: Iterable[str | None]) -> str | None:
    """Return the shortest name, and of those the first in the alphabet: ``log[0]`` rather than ``log[2]``.

    The tensors come in the order of the garbage collector's list, which depends on when it ran.
    """
    return min(filter(None, names), key=lambda name: (len(name), name), default=None)


def _parts(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, Mapping):
        yield from ((f"{name}[{key!r}]" if isinstance(key, str) else f"{name}[...]", value)
                    for key, value in thing.items())  # fmt: skip
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from ((f"{name}[{index}]", value) for index, value in enumerate(thing))
    elif isinstance(thing, MethodType | partial):
        yield from (
            (name, getattr(thing, key, None)) for key in ("__func__", "__self__", "func", "args", "keywords")
        )
    elif isinstance(thing, FunctionType):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
        yield from ((free, cell.cell_contents) for free, cell in cells if cell != type(cell)())
        used = thing.__code__.co_names
        yield from ((each, thing.__globals__[each]) for each in used if each in thing.__globals__)
        yield from ((f"{name}'s default", value) for value in thing.__defaults__ or ())
    if isinstance(thing, torch.Tensor):
        yield f"{name}.grad", thing.grad
    if not isinstance(thing, type):
        if _is_the_readers(type(thing)):
            yield type(thing).__name__, type(thing)
        yield from ((f"{name}.{key}", value) for key, value in getattr(thing, "__dict__", {}).items())
    else:
        yield from ((f"{thing.__name__}.{key}", value) for key, value in vars(thing).items())
        yield from ((base.__name__, base) for base in thing.__bases__ if _is_the_readers(base))


def _is_the_readers(cls: type) -> bool:
    return cls.__module__.partition(".")[0] not in ("builtins", "torch", "collections")


def _tensors() -> Iterator[torch.Tensor]:
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout is torch.strided and not thing.is_meta:
            yield thing


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
