"""Lesson 09: what an engine holds: tensors, the bytes behind them, and the state of its optimizers."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_leaves_with_path

from zerolab.course.alive import Alive, kept_by
from zerolab.storages import storage_bytes

ITEM = 8  # bytes of an element
SMALL = 64  # bytes that are not counted: of an attribute with a number for each micro-batch, or so


def tensors(given: Any) -> list[torch.Tensor]:
    """Each of the given parameters once."""
    return list({id(each): each for each in given.values()}.values()) if isinstance(given, dict) else [given]


def kept_bytes(alive: Alive, engine: Any, given: Any) -> dict[str, int]:
    """The bytes of each new storage that the engine keeps, by the name under which it does."""
    found = alive.storages(leave_out=tensors(given))
    arrays = dict(_arrays(engine))
    owners = {name: each for name, each in arrays.items() if isinstance(each, torch.Tensor)}
    behind = {each.untyped_storage().data_ptr(): name for name, each in owners.items()}
    kept = {}
    for tensor in found.values():
        storage = tensor.untyped_storage()
        if name := kept_by(tensor, engine=engine) or behind.get(storage.data_ptr()):
            kept[name] = storage.nbytes()
    kept |= {name: each.nbytes for name, each in arrays.items() if isinstance(each, np.ndarray)}
    kept |= _lists(engine)
    return {name.replace("engine.", "self."): size for name, size in kept.items()}


def _arrays(engine: Any) -> Iterator[tuple[str, Any]]:
    """What owns the memory of each numpy array that the engine keeps: an array or a tensor; by name."""
    for name, value in vars(engine).items():
        for path, leaf in tree_leaves_with_path(value):
            if isinstance(leaf, np.ndarray):
                yield f"engine.{name}{keystr(path)}", _owner(leaf)


def _owner(array: Any) -> Any:
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return array


def _lists(engine: Any) -> dict[str, int]:
    """The bytes of the numbers in each list that the engine keeps, where they are more than a few."""
    sizes: Counter[str] = Counter()
    for name, value in vars(engine).items():
        for path, leaf in tree_leaves_with_path(value):
            sizes[f"engine.{name}{keystr(path[:-1])}"] += ITEM * isinstance(leaf, int | float)
    return {name: size for name, size in sizes.items() if size > SMALL}


def momenta(engine: Any) -> list[torch.Tensor | None]:
    """The momentum of each parameter of the engine's optimizers, as it is now."""
    shards = [
        (each, shard)
        for each in _optimizers(engine)
        for group in each.param_groups
        for shard in group["params"]
    ]
    found = [each.state.get(shard, {}).get("momentum_buffer") for each, shard in shards]
    return [each.detach().clone() if isinstance(each, torch.Tensor) else None for each in found]


def state(engine: Any) -> int:
    """The elements of state in the engine's optimizers, with what views of them keep in memory."""
    values = [
        value for each in _optimizers(engine) for state in each.state.values() for value in state.values()
    ]
    return storage_bytes(value for value in values if isinstance(value, torch.Tensor)) // ITEM


def rates(engine: Any) -> list[float]:
    """The learning rates of the engine's optimizers."""
    return [group["lr"] for each in _optimizers(engine) for group in each.param_groups]


def _optimizers(engine: Any) -> list[torch.optim.Optimizer]:
    return [each for each in vars(engine).values() if isinstance(each, torch.optim.Optimizer)]
