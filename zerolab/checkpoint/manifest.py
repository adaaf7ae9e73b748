"""Describe a checkpoint's contents, so that it loads only into a matching model."""

import pickle
from collections import ChainMap
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from types import NoneType
from typing import Any
from zipfile import ZipFile

import torch
from torch import nn
from torch.utils.serialization import config

from zerolab.checkpoint import buffers, extra_state, generations
from zerolab.checkpoint.records import Record, pickled, serialized, unpickle
from zerolab.optimizer import Shard, ZeroOptimizer


def key_of(shard: Shard) -> str:
    """Return the name under which a shard's tensor is stored."""
    return _key(shard, shard.part)


def _key(shard: Shard, part: str) -> str:
    name = f"{shard.name}{part}"
    return f"model.{name}" if shard.key is None else f"optimizer.{name}.{shard.key}"


def state_here(optimizer: ZeroOptimizer) -> tuple[dict, dict]:
    """Describe this rank's state by parameter name and key, and say how many elements each stored tensor has.

    Raises: ValueError for state that cannot be stored.
    """
    return optimizer.describe_state(), _tensors(optimizer)


def describe(optimizer: ZeroOptimizer, states: list[tuple[dict, dict]]) -> dict:
    """Describe the parameters, the optimizer's class, its parameter groups by name, and its state.

    Of values that are sharded it has the dtype only. The records are added later.
    Args: states: as `state_here` returns them, of all ranks that may have state that others have not.

    Warns of values that `read` refuses without ``trust``. Raises: ValueError for one that does not pickle, or
    for a buffer that cannot be stored.
    """
    buffers.require_storable(optimizer.model)
    extra_state.require_no_other(optimizer.model)
    groups = zip(_group_names(optimizer), optimizer.param_groups, strict=True)
    description = {
        "format": generations.FORMAT,
        "world_size": optimizer.axes.everyone.world_size,
        "tensor_parallel": optimizer.axes.size,
        "parameters": _forms(optimizer.model),
        "buffers": _buffer_forms(optimizer.model),
        "extra_state": _extra_state_forms(optimizer.model),
        "optimizer": optimizer.updates.names,
        "classes": optimizer.updates.classes,
        "loss_scale": None if optimizer.loss_scale is None else optimizer.loss_scale.state_dict(),
        "groups": [{"names": names, "options": _options(group)} for names, group in groups],
        "state": dict(ChainMap(*(state for state, _ in states))),
        "tensors": dict(ChainMap(*(tensors for _, tensors in states)))
        | {buffers.key_of(name, 0): b.numel() for name, b in buffers.persistent(optimizer.model).items()},
    }
    for what, value in _named_values(description):
        _require_storable(what, value)
    return description


def _tensors(optimizer: ZeroOptimizer) -> dict[str, int]:
    """How many elements each stored tensor has, the parts of other tensor-parallel ranks included."""
    parameters = dict(optimizer.model.named_parameters())
    return {
        _key(shard, part): shard.numel
        for shard in optimizer.shard_forms()
        for part in optimizer.axes.parts(parameters[shard.name])
    }


def _named_values(description: dict) -> Iterator[tuple[str, Any]]:
    """The user's and the optimizer's own values in a manifest, with what each is."""
    for place, group in enumerate(description["groups"]):
        for name, value in group["options"].items():
            yield f"this checkpoint: hyperparameter {name} of parameter group {place}", value
    for parameter, state in description["state"].items():
        for key, value in state.items():
            yield f"this checkpoint: the optimizer's {key} for {parameter}", value


def _require_storable(what: str, value: Any) -> None:
    if not isinstance(value, (bool, int, float, str, NoneType, torch.Tensor, torch.dtype)):
        try:
            pickled(what, value)
        except Exception as error:
            raise ValueError(f"{what} cannot be saved: {error}. Keep what can be pickled there") from error


def write(folder: Path, manifest: dict) -> None:
    """Write the manifest, which makes the generation complete. Raises: ValueError if a record is missing."""
    require_whole(manifest)
    with config.patch("save.compute_crc32", True):  # type: ignore[attr-defined]  # made at run time
        content = serialized(manifest | {"records": [tuple(each) for each in manifest["records"]]})
    generations.put(folder / generations.MANIFEST, content)


def read(folder: Path, trust: bool) -> dict:
    """Return the manifest of a generation, its records by key.

    Raises: OSError where it is damaged, UnpicklingError where loading it needs ``trust``, ValueError where
        another version wrote it.
    """
    path = folder / generations.MANIFEST
    try:
        with ZipFile(path) as archive:
            damaged = archive.testzip()
        manifest: dict = {} if damaged else unpickle("manifest", path.read_bytes(), trust)
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a file with a damaged header fails in many ways
        raise OSError(f"{path} is damaged: {error}") from error
    if damaged:
        raise OSError(f"{path} is damaged: the checksum of its {damaged} is wrong")
    if manifest["format"] != generations.FORMAT:
        raise ValueError(
            f"{path} is of format {manifest['format']}, and this version reads format {generations.FORMAT}: "
            "load it with the version of zerolab that saved it"
        )
    by_key: dict[str, list[Record]] = {}
    for record in (Record(*each) for each in manifest["records"]):
        by_key.setdefault(record.key, []).append(record)
    return manifest | {"records": by_key}


def require_whole(manifest: dict) -> None:
    """Check that the records hold every element of every tensor, each once. Raises: ValueError."""
    stops = dict.fromkeys(manifest["tensors"], 0)
    for record in sorted(manifest["records"], key=lambda record: (record.key, record.start)):
        if stops.get(record.key) == record.start:
            stops[record.key] = record.stop
    for key, numel in manifest["tensors"].items():
        if stops[key] != numel:
            raise ValueError(
                f"{key} is not stored as a whole: element {stops[key]} of {numel} is in no record"
            )


def check(manifest: dict, optimizer: ZeroOptimizer) -> None:
    """See that a checkpoint is of this model and optimizer. Raises: ValueError, with the first difference."""
    parts = manifest.get("tensor_parallel", 1)
    if parts != optimizer.axes.size:
        raise ValueError(
            f"the checkpoint is of {parts} tensor-parallel ranks, and the optimizer has "
            f"{optimizer.axes.size}: load it with as many ranks, and zerolab.export() then writes the whole "
            "model"
        )
    _check_forms("parameter", manifest["parameters"], _forms(optimizer.model))
    check_modules(manifest, optimizer.model)
    buffers.require_writable(optimizer.model)  # at a save it need not be: the model that loads has its own
    stored, ours = manifest["optimizer"], optimizer.updates.names
    if stored != ours:
        raise _of_another(stored, ours)
    _check_groups([group["names"] for group in manifest["groups"]], _group_names(optimizer))
    _check_classes(manifest.get("classes", []), optimizer.updates.classes)
    for place, group in enumerate(manifest["groups"]):
        optimizer.updates.require_kind(place, group["options"])


def _check_classes(stored: list[tuple[str, list[str]]], ours: list[tuple[str, list[str]]]) -> None:
    """Two classes of one name may be one, imported from another module: then they have the same options."""
    for (theirs, their_options), (mine, my_options) in zip(stored, ours, strict=False):
        if theirs != mine and their_options != my_options:
            raise _of_another(theirs, mine)


def _of_another(stored: str, ours: str) -> ValueError:
    return ValueError(
        f"the checkpoint is of {stored} and the optimizer is {ours}: "
        "their states mean different things; pass the class that was saved, and the classes in params="
    )


def _check_groups(stored: list[list[str]], ours: list[list[str]]) -> None:
    for place, (theirs, mine) in enumerate(zip_longest(stored, ours, fillvalue=())):
        for name in _in_order(theirs, mine):
            if (name in theirs) != (name in mine):
                here, there = ("checkpoint", "optimizer") if name in theirs else ("optimizer", "checkpoint")
                raise ValueError(
                    f"parameter group {place} of the {here} has {name}, and that of the {there} does not: "
                    "build the optimizer with the groups that were saved"
                )
    if len(stored) != len(ours):
        raise ValueError(
            f"the checkpoint has {len(stored)} parameter groups and the optimizer {len(ours)}: "
            "build it with the groups that were saved, empty ones too"
        )


def check_modules(manifest: dict, model: nn.Module) -> None:
    """See that buffers and extra state are this model's. Raises: ValueError, with the first difference.

    Or for a buffer that cannot be stored, which only this rank may have.
    """
    buffers.require_storable(model)
    _check_forms("buffer", manifest["buffers"], _buffer_forms(model))
    _check_forms("the extra state of", manifest["extra_state"], _extra_state_forms(model))


def _check_forms(kind: str, stored: dict[str, str], ours: dict[str, str]) -> None:
    for name in _in_order(stored, ours):
        if stored.get(name) != ours.get(name):
            raise ValueError(
                f"{kind} {name} is {stored.get(name, 'missing')} in the checkpoint and "
                f"{ours.get(name, 'missing')} in the model: build the model that was saved"
            )


def _forms(model: nn.Module) -> dict[str, str]:
    """Return how each parameter lies in memory, by name: its elements are stored in the order of memory."""
    return {name: _form(parameter) for name, parameter in model.named_parameters()}


def _form(parameter: nn.Parameter) -> str:
    strides = "" if parameter.is_contiguous() else f" with strides {parameter.stride()}"
    return f"of shape {tuple(parameter.shape)}{strides}"


def _buffer_forms(model: nn.Module) -> dict[str, str]:
    return {name: f"of shape {tuple(buffer.shape)}" for name, buffer in buffers.persistent(model).items()}


def _extra_state_forms(model: nn.Module) -> dict[str, str]:
    return {name or "the model": "there" for name in extra_state.keepers(model)}


def _group_names(optimizer: ZeroOptimizer) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in optimizer.model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _options(group: dict) -> dict:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _in_order(first: Iterable[str], second: Iterable[str]) -> list[str]:
    """Return the names of both, each once: the order in which a first difference is looked for."""
    return list(dict.fromkeys([*first, *second]))
