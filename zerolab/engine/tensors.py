"""Find the tensors in a forward's arguments or outputs, however nested."""

from collections.abc import Mapping
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
