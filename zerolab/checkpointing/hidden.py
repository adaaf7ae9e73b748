"""Tensors that checkpointing cannot take out of memory, because they are not arguments of the block.

A function may have them in its closure, and an argument may be an object with tensors inside.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_OPAQUE = (nn.Module, type, types.ModuleType)
"""What keeps its tensors anyway: a module has its parameters, buffers and attributes."""


def is_activation(value: object) -> bool:
    """A parameter is kept anyway, and a placeholder of one has no values."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def name_of(block: Callable) -> str:
    return getattr(block, "__qualname__", type(block).__name__)


def refuse_hidden(block: Callable, inputs: list) -> None:
    """Refuse a block that has tensors besides its inputs, and inputs that have activations inside.

    An object may have tensors that need no gradient: an attention mask is made once, for all blocks.

    Args: inputs: the block's arguments, taken out of lists, tuples and dicts.
    Raises: ValueError.
    """
    found = next(_activations([block], set()), None)
    if found is not None:
        raise ValueError(
            f"{name_of(block)} has a tensor {list(found.shape)} in its closure, its defaults or its object, "
            "which checkpointing cannot take out of memory: pass it as an argument, as in "
            "checkpointing(block, stream, mask)"
        )
    for each in inputs:
        inside = _activations(_contents(each, is_argument=True), set())
        found = next((tensor for tensor in inside if tensor.requires_grad), None)
        if found is not None:
            raise ValueError(
                f"an argument of {name_of(block)} is a {type(each).__name__} with an activation "
                f"{list(found.shape)} in it, which checkpointing cannot take out of memory: pass the tensor "
                "as an argument of its own, or in a list, a tuple or a dict"
            )


def _activations(values: list, seen: set[int]) -> Iterator[Tensor]:
    """The activations among values, and in what these bring along, in their turn."""
    for each in tree_leaves(values):
        if is_activation(each):
            yield each
        elif id(each) not in seen:
            seen.add(id(each))
            yield from _activations(_contents(each), seen)


def _contents(value: Any, is_argument: bool = False) -> list:
    """What a value brings along: a function its closure and defaults, a container its elements, and an object
    that is called or that holds data its attributes.

    Any other object is opened where it is an argument only: through a closure a whole program is reached.
    """
    if isinstance(value, (Tensor, *_OPAQUE)):
        return []
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        owner = value.__self__
        return [value.__func__, *([] if isinstance(owner, _OPAQUE) else _attributes(owner))]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [cells, value.__defaults__, value.__kwdefaults__]
    if isinstance(value, (Mapping, Set)):
        return list(value.values() if isinstance(value, Mapping) else value)
    return _attributes(value) if is_argument or callable(value) or _holds_data(value) else []


def _holds_data(value: object) -> bool:
    """Return whether this is a dataclass, a namespace or an object of the same kind, with a few fields."""
    is_plain = dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace)
    return is_plain or not hasattr(value, "__dict__")


def _attributes(value: object) -> list:
    """The values of an object's attributes, of those in ``__slots__`` too. No property is computed."""
    slots = [getattr(each, "__slots__", ()) for each in type(value).__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in names)]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
