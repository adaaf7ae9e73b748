"""Units: find the parameters of a model that are needed together.

A unit is one module and the parameters that are used nowhere else. The blocks of a network are the natural
units: the children of its outermost ModuleLists and Sequentials. All other parameters, and those that two
units share, belong to the root unit, which lasts for the whole forward.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, eq=False)
class Unit:
    """One module, and the parameters that only it uses.

    Attributes: entry_modules: the modules through which a forward can enter the unit: its own, and those
        inside it that hold parameters, because users call them directly too.
    """

    name: str
    module: nn.Module
    entry_modules: list[nn.Module]
    parameters: list[tuple[str, nn.Parameter]]
    is_root: bool = False


def find_units(model: nn.Module, modules: list[nn.Module] | None = None) -> list[Unit]:
    """Divide all parameters of ``model`` into units, in the order of registration, the root unit last.

    Args: modules: the modules to make units of, instead of the outermost containers' children.
    Raises: ValueError where one of ``modules`` is not part of the model, or lies inside another.
    """
    names = {id(module): name for name, module in model.named_modules()}
    chosen = _check(model, names, modules) if modules is not None else list(_blocks(model))
    used_in = _module_of_each_parameter(model, chosen)
    root = "root" if "root" not in names.values() else "root of the model"
    units = []
    for module in [*chosen, model]:
        own = [(name, p) for name, p in model.named_parameters() if used_in[id(p)] is module]
        own_ids = {id(parameter) for _, parameter in own}
        holders = [m for m in module.modules() if any(id(p) in own_ids for p in m.parameters(recurse=False))]
        entry_modules = [module, *(m for m in holders if m is not module)]
        if own:
            is_root = module is model
            units.append(Unit(names[id(module)] or root, module, entry_modules, own, is_root))
    return units


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The children of the outermost ModuleLists and Sequentials, each once.

    A child that is itself a list has no forward, so its own children are taken instead.
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


def _module_of_each_parameter(model: nn.Module, chosen: list[nn.Module]) -> dict[int, nn.Module]:
    """For each parameter, by id, the chosen module that uses it; the model where several do, or none."""
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
    """Return the modules a user gave as units, if they can be."""
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
