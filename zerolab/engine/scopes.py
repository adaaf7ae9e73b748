"""Scopes: which parameters are needed together, found in a model that nobody prepared.

A scope is a stretch of the forward pass, one module's, and the parameters that nobody uses outside it. The
blocks of a network are the natural ones: the children of its outermost ModuleLists and Sequentials. What is
left over, and whatever two scopes share, belongs to the root scope, which lasts for the whole forward.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass

import torch
from torch import nn

from zerolab.unit import FlatUnit

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(eq=False)
class Scope:
    """One module, the parameters only it uses, and where the forward and backward pass stand in it.

    ``doors`` are the modules through which a forward can enter: the scope's own, and any inside it that hold
    parameters, because users call those directly too. ``depth`` counts the doors that are open;
    of the inputs of the last forward, ``inputs_done`` of ``inputs_watched`` have their gradient.
    """

    name: str
    module: nn.Module
    doors: list[nn.Module]
    parameters: list[tuple[str, nn.Parameter]]
    is_root: bool = False
    units: list[FlatUnit] = field(default_factory=list)
    depth: int = 0
    expects_backward: bool = False
    inputs_watched: int = 0
    inputs_done: int = 0


def find_scopes(model: nn.Module, modules: list[nn.Module] | None = None) -> list[Scope]:
    """Divide all parameters of ``model`` into scopes, in the order of registration, the root scope last.

    Args: modules: the modules to make scopes of, instead of the outermost containers' children.
    Raises: ValueError where one of ``modules`` is not part of the model, or lies inside another.
    """
    names = {id(module): name for name, module in model.named_modules()}
    chosen = _check(model, names, modules) if modules is not None else list(_blocks(model))
    homes = _homes(model, chosen)
    scopes = []
    for module in [*chosen, model]:
        mine = [(name, p) for name, p in model.named_parameters() if homes[id(p)] is module]
        held = {id(parameter) for _, parameter in mine}
        inside = [m for m in module.modules() if any(id(p) in held for p in m.parameters(recurse=False))]
        doors = [module, *(m for m in inside if m is not module)]
        if mine:
            scopes.append(Scope(names[id(module)] or "root", module, doors, mine, is_root=module is model))
    return scopes


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The children of the outermost ModuleLists and Sequentials, each once.

    A child that is itself a list has no forward to enter by, so its own children are taken in its stead.
    """
    container = isinstance(module, (nn.ModuleList, nn.Sequential))
    for child in module.children():
        if container and not isinstance(child, _WITHOUT_FORWARD):
            yield child
        elif container:
            yield from (m for m in _leaves(child))
        else:
            yield from _blocks(child)


def _leaves(container: nn.Module) -> Iterator[nn.Module]:
    """The first modules with a forward of their own inside a ModuleList or ModuleDict."""
    for child in container.children():
        if isinstance(child, _WITHOUT_FORWARD):
            yield from _leaves(child)
        else:
            yield child


def _homes(model: nn.Module, chosen: list[nn.Module]) -> dict[int, nn.Module]:
    """For each parameter, by id, the one scope it is used in: the root where there are several, or none."""
    inside: dict[int, set[int]] = {}
    for block in chosen:
        for module in block.modules():
            inside.setdefault(id(module), set()).add(id(block))
    by_id = {id(block): block for block in chosen}
    users: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), set()).update(inside.get(id(module), {id(model)}))
    return {
        key: by_id.get(next(iter(blocks)), model) if len(blocks) == 1 else model
        for key, blocks in users.items()
    }


def _check(model: nn.Module, names: dict[int, str], modules: list[nn.Module]) -> list[nn.Module]:
    """The modules a user gave as units, if they can be."""
    for module in modules:
        if module is model:
            raise ValueError(
                f"units: {type(model).__name__} is the model itself: pass units=[] to gather it as one unit"
            )
        if id(module) not in names:
            raise ValueError(
                f"units: {_shown(module)} is not a submodule of the {type(model).__name__} given: "
                "pass modules found in model.modules(), for example list(model.blocks)"
            )
        nested = [
            other for other in modules if other is not module and any(m is module for m in other.modules())
        ]
        if nested:
            raise ValueError(
                f"units: {names[id(module)]!r} lies inside {names[id(nested[0])]!r}, and a parameter "
                "can belong to one unit only: pass either the outer or the inner module"
            )
    return list(dict.fromkeys(modules))


def _shown(value) -> str:
    return type(value).__name__ if isinstance(value, nn.Module) else repr(value)


def tensors_in(tree) -> Iterator[torch.Tensor]:
    """Every tensor in what a forward takes or returns: nested lists, dicts, dataclasses, plain objects."""
    seen: set[int] = set()
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, torch.Tensor):
            yield node
        elif id(node) not in seen and not isinstance(node, (str, bytes, int, float, nn.Module, type(None))):
            seen.add(id(node))
            waiting.extend(_children(node))


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
