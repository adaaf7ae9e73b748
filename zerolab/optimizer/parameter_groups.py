"""Parameter groups as a user may give them, in one form: dicts with a list of parameters."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

_FORM = "groups are dicts in a list, as in params=[{'params': [...], 'lr': 0.1}, {'params': [...]}]"

Params = Iterable | Callable[[nn.Module], Iterable] | None


def parameter_groups(model: nn.Module, params: Params, may_be_empty: bool = False) -> list[dict]:
    """Return the parameter groups in one form: dicts with a list of the model's parameters.

    Accepts what torch's optimizers accept: parameters, (name, parameter) pairs, or dicts of either with their
    options; or a function that returns these, given the model. As in torch.optim, the dicts stay the user's,
    with ``params`` as a list: what is written to them later counts. A dict with an ``optimizer`` is copied,
    because that and its keywords are taken out of it.
    Raises: TypeError for anything else; ValueError for a parameter that is not the model's, or twice there,
    or for none at all, and where only some groups have ``param_names``.
    """
    if params is None:
        return [{"params": [p for p in model.parameters() if p.requires_grad]}]
    entries = _entries(model, params)
    groups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
    found = [_group(place, group) for place, group in enumerate(groups)]
    groups = [group for group, _ in found]
    if any(names for _, names in found) and None not in [names for _, names in found]:
        for group, names in found:  # as torch.optim notes them
            group["param_names"] = names
    _require_each_once(model, [p for group in groups for p in group["params"]])
    require_names_alike(groups)
    if not may_be_empty and not any(group["params"] for group in groups):
        raise ValueError(
            "params is empty: pass some of model.parameters(), or leave it out to train all of them"
        )
    return groups


def require_names_alike(groups: list[dict]) -> None:
    """Raises: ValueError where only some groups name their parameters, which torch.optim does not take."""
    if len({"param_names" in group for group in groups}) > 1:
        raise ValueError(
            "a parameter group has 'param_names' and another has none: give all of them names, or none"
        )


def _require_each_once(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    """Raises: ValueError for a parameter that is not the model's, or that is listed twice."""
    names = {id(p): name for name, p in model.named_parameters()}
    seen: set[int] = set()
    for parameter in parameters:
        if id(parameter) not in names:
            raise ValueError(
                f"params holds a tensor of shape {tuple(parameter.shape)} that is not a parameter of the "
                f"{type(model).__name__} given: take them from model.parameters() of that very model"
            )
        if id(parameter) in seen:
            raise ValueError(
                f"params lists {names[id(parameter)]} twice: list each parameter once, in one group. Where "
                "modules share it, list(dict.fromkeys(parameters)) leaves the repeated ones out"
            )
        seen.add(id(parameter))


def _entries(model: nn.Module, params: Iterable | Callable[[nn.Module], Iterable]) -> list:
    """What is in ``params``. Raises: TypeError for a single tensor, group, class or text."""
    if isinstance(params, torch.Tensor):
        raise TypeError(
            "params is one tensor: pass a list of parameters, as in params=[weight], or leave it out"
        )
    if isinstance(params, type):
        raise TypeError(
            f"params is the class {params.__name__}: pass params=zerolab.matrices_by({params.__name__}), "
            "which gives it the matrices in the blocks, or groups with an 'optimizer' each"
        )
    if isinstance(params, Mapping):
        raise TypeError(f"params is one dict: {_FORM}")
    given = params(model) if callable(params) else params
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise TypeError(f"params is {given!r}: pass parameters, as from model.parameters(); or {_FORM}")
    return list(given)


def _group(place: int, group: Any) -> tuple[dict, list[str] | None]:
    """A group with a list of parameters, and their names, if all of them came with one."""
    if not isinstance(group, dict):
        raise TypeError(f"parameter group {place} is a {type(group).__name__}: {_FORM}")
    if "params" not in group:
        raise ValueError(
            f"parameter group {place} has {', '.join(map(repr, group))} and no 'params': {_FORM}"
        )
    given = group["params"]
    entries = [given] if isinstance(given, torch.Tensor) else list(given)
    parameters = _parameters(entries)
    names = [entry[0] for entry in entries if isinstance(entry, tuple)]
    if "optimizer" in group:
        group = group | {"params": parameters}
    else:
        group["params"] = parameters
    return group, names if len(names) == len(entries) else None


def _parameters(entries: list) -> list[nn.Parameter]:
    parameters = [entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry for entry in entries]
    for parameter in parameters:
        if not isinstance(parameter, nn.Parameter):
            raise TypeError(
                f"params holds a {type(parameter).__name__}: pass parameters, as from model.parameters(); or "
                f"{_FORM}"
            )
    return parameters
