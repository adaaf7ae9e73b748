"""Manifest: what a checkpoint says of itself, so that it is read into the right model or not at all."""

from collections.abc import Iterable
from itertools import zip_longest

import torch

from zerolab.optimizer import ZeroOptimizer
from zerolab.optimizer.groups import options_of
from zerolab.optimizer.slices import Slice
from zerolab.unit.span import Span

FORMAT = 1


def describe(optimizer: ZeroOptimizer) -> dict:
    """Names and forms, the optimizer's class, its parameter groups by name, and its state but for the values
    that are sharded: of those the dtype.
    """
    groups = zip(_group_names(optimizer), optimizer.param_groups, strict=True)
    return {
        "format": FORMAT,
        "world_size": optimizer.world_size,
        "parameters": _forms(optimizer),
        "optimizer": _class_name(optimizer),
        "loss_scale": None if optimizer.loss_scale is None else optimizer.loss_scale.state_dict(),
        "groups": [{"names": names, "options": options_of(group)} for names, group in groups],
        "state": {
            each.span.name: _state(each, optimizer.state[each.tensor])
            for each in optimizer.slices
            if each.tensor in optimizer.state
        },
    }


def check(manifest: dict, optimizer: ZeroOptimizer) -> None:
    """See that a checkpoint is of this model and optimizer. Raises: ValueError, with the first difference."""
    if manifest["format"] != FORMAT:
        raise ValueError(f"the checkpoint is of format {manifest['format']}, and this reads {FORMAT}")
    stored, ours = manifest["parameters"], _forms(optimizer)
    for name in _in_order(stored, ours):
        if stored.get(name) != ours.get(name):
            raise ValueError(
                f"parameter {name} is {stored.get(name, 'missing')} in the checkpoint and "
                f"{ours.get(name, 'missing')} in the model: build the model that was saved"
            )
    if manifest["optimizer"] != _class_name(optimizer):
        raise ValueError(
            f"the checkpoint is of {manifest['optimizer']} and the optimizer is {_class_name(optimizer)}: "
            "their states mean different things; pass the class that was saved"
        )
    _check_groups([group["names"] for group in manifest["groups"]], _group_names(optimizer))


def _check_groups(stored: list[list[str]], ours: list[list[str]]) -> None:
    for place, (theirs, mine) in enumerate(zip_longest(stored, ours, fillvalue=())):
        for name in _in_order(theirs, mine):
            if (name in theirs) != (name in mine):
                here, there = ("checkpoint", "optimizer") if name in theirs else ("optimizer", "checkpoint")
                raise ValueError(
                    f"parameter group {place} of the {here} has {name}, and that of the {there} has not: "
                    "build the optimizer with the groups that were saved"
                )
    if len(stored) != len(ours):
        raise ValueError(
            f"the checkpoint has {len(stored)} parameter groups and the optimizer {len(ours)}: "
            "build it with the groups that were saved, empty ones too"
        )


def _forms(optimizer: ZeroOptimizer) -> dict[str, str]:
    """How each parameter lies in memory, by name: pieces are stored in the order of memory."""
    return {span.name: _form(span) for unit in optimizer.units for span in unit.spans}


def _form(span: Span) -> str:
    strides = "" if span.layout.is_contiguous() else f" with strides {span.layout.stride()}"
    return f"of shape {span.shape}{strides}"


def _class_name(optimizer: ZeroOptimizer) -> str:
    return optimizer.optimizer_class_name


def _group_names(optimizer: ZeroOptimizer) -> list[list[str]]:
    names = {id(span.parameter): span.name for unit in optimizer.units for span in unit.spans}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _in_order(first: Iterable[str], second: Iterable[str]) -> list[str]:
    """The names of both, each once: the order in which a first difference is looked for."""
    return list(dict.fromkeys([*first, *second]))


def _state(each: Slice, state: dict) -> dict:
    """One parameter's state: scalars as they are, the dtype of what has a value for each element."""
    entries = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            entries[key] = value
        elif value.dim() == 0:
            entries[key] = value.cpu()
        elif value.shape == each.tensor.shape:
            entries[key] = value.dtype
        else:
            raise ValueError(
                f"the optimizer's {key} for {each.span.name} has shape {tuple(value.shape)}, neither one "
                "value nor one for each element: it cannot be stored by element"
            )
    return entries
