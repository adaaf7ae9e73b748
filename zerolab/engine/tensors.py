"""Find the tensors in a forward's arguments or outputs, however nested, and those in freed memory."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass

import torch
from torch import nn


def tensors_in(tree) -> list[torch.Tensor]:
    """Every tensor in what a forward takes or returns: nested lists, dicts, dataclasses, plain objects."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, torch.Tensor):
            found.append(node)
        elif id(node) not in seen and not isinstance(node, (str, bytes, int, float, nn.Module, type(None))):
            seen.add(id(node))
            waiting.extend(_children(node))
    return found


def refuse_views(outputs: Iterable[torch.Tensor], freed: torch.Tensor, unit: str) -> None:
    """Refuse outputs of a unit's module that are in the memory of its parameters, which was freed.

    To read such a tensor would end the process. A parameter itself says that it is sharded.
    Raises: RuntimeError that names the unit.
    """
    for tensor in outputs:
        if torch._C._is_alias_of(tensor, freed) and not isinstance(tensor, nn.Parameter):  # type: ignore[attr-defined]
            raise RuntimeError(
                f"a module of unit {unit} returns a tensor in the memory of its parameters, as a slice or "
                "parameter.expand(...) is, and at stage 3 that memory is freed after the module's forward: "
                "return a copy, as in parameter.expand(...).clone()"
            )


def _children(node) -> list:
    if isinstance(node, Mapping):
        return list(node.values())
    if isinstance(node, (list, tuple, set, frozenset)):
        return list(node)
    if is_dataclass(node) and not isinstance(node, type):
        return [getattr(node, each.name) for each in fields(node)]
    if callable(node):
        return []
    slots = {name for kind in type(node).__mro__ for name in getattr(kind, "__slots__", ())}
    held = {name: getattr(node, name) for name in slots if hasattr(node, name)} | getattr(
        node, "__dict__", {}
    )
    return list(held.values())
