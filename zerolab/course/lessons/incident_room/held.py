"""Lesson 09: what an engine holds: tensors, the bytes behind them, and the state of its optimizers."""

from typing import Any

import torch

from zerolab.course.alive import Alive, kept_by
from zerolab.storages import storage_bytes

ITEM = 8  # bytes of an element


def tensors(given: Any) -> list[torch.Tensor]:
    """Each of the given parameters once."""
    return list({id(each): each for each in given.values()}.values()) if isinstance(given, dict) else [given]


def kept_bytes(alive: Alive, engine: Any, given: Any) -> dict[str, int]:
    """The bytes of each new storage that the engine keeps, by the name under which it does."""
    found = alive.storages(leave_out=tensors(given))
    names = {kept_by(tensor, engine=engine): tensor.untyped_storage().nbytes() for tensor in found.values()}
    return {name.replace("engine.", "self."): size for name, size in names.items() if name}


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
