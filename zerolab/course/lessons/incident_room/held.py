"""Lesson 09: what an engine holds: tensors, the bytes behind them, and the state of its optimizers."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_leaves_with_path

from zerolab.course.alive import Alive, kept_by
from zerolab.course.lessons.incident_room.engine import MOMENTUM
from zerolab.storages import storage_bytes

ITEM = 8  # bytes of an element
SMALL = 64  # bytes that are not counted: of an attribute with a number for each micro-batch, or so


def tensors(given: Any) -> list[torch.Tensor]:
    """Each of the given parameters once."""
    return list({id(each): each for each in given.values()}.values()) if isinstance(given, dict) else [given]


class Held(NamedTuple):
    """What is in memory at one moment.

    Attributes:
        kept: the bytes of each storage that the engine keeps, by the name under which it does.
        others: the names of those that are as long as all parameters, and are not the parameters.
        whole: how many storages are as long as all parameters, whoever keeps them.
    """

    kept: dict[str, int]
    others: list[str]
    whole: int


def held(alive: Alive, engine: Any, leave_out: Sequence[torch.Tensor], parameters: torch.Tensor) -> Held:
    """What is new in memory, and in none of the tensors of `leave_out`."""
    found = alive.storages(leave_out)
    arrays = dict(_arrays(engine))
    owners = {name: each for name, each in arrays.items() if isinstance(each, torch.Tensor)}
    behind = {each.untyped_storage().data_ptr(): name for name, each in owners.items()}
    kept, others, whole = {}, [], 0
    for tensor in found.values():
        storage = tensor.untyped_storage()
        name = kept_by(tensor, engine=engine) or behind.get(storage.data_ptr())
        if name:
            kept[name] = storage.nbytes()
        if storage.nbytes() >= parameters.nbytes:
            whole += 1
            others += [name] if name and not _is(storage, parameters) else []
    kept |= {name: each.nbytes for name, each in arrays.items() if isinstance(each, np.ndarray)}
    kept |= _lists(engine)
    own = lambda name: name.replace("engine.", "self.")
    return Held({own(name): size for name, size in kept.items()}, list(map(own, others)), whole)


def _is(storage: torch.UntypedStorage, parameters: torch.Tensor) -> bool:
    """Whether a storage holds the parameters, and nothing else but padding."""
    values = torch.tensor([], dtype=parameters.dtype, device=parameters.device).set_(storage)
    return torch.allclose(values[: len(parameters)], parameters)


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
    """A copy of the momentum of each parameter of the engine's optimizers, as it is now."""
    return [each.detach().clone() if isinstance(each, torch.Tensor) else None for each in _momenta(engine)]


def behind(engine: Any) -> int:
    """The elements in the storages of these momenta, which are more if one is a view of a larger tensor."""
    return storage_bytes(each for each in _momenta(engine) if isinstance(each, torch.Tensor)) // ITEM


def _momenta(engine: Any) -> list[Any]:
    shards = [
        (each, shard)
        for each in _optimizers(engine)
        for group in each.param_groups
        for shard in group["params"]
    ]
    return [each.state.get(shard, {}).get("momentum_buffer") for each, shard in shards]


def state(engine: Any) -> int:
    """The elements of state in the engine's optimizers, with what views of them keep in memory."""
    values = [
        value for each in _optimizers(engine) for state in each.state.values() for value in state.values()
    ]
    return storage_bytes(value for value in values if isinstance(value, torch.Tensor)) // ITEM


def settings(engine: Any) -> list[str]:
    """How the engine's optimizers differ from SGD with the ticket's momentum, but for the learning rate."""
    plain = {"momentum": MOMENTUM, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}
    found = []
    for optimizer in _optimizers(engine):
        kind = type(optimizer).__name__
        found += [f"the class {kind}"] if not isinstance(optimizer, torch.optim.SGD) else []
        for group in optimizer.param_groups:
            found += [
                f"{name}={group[name]}" for name, value in plain.items() if group.get(name, value) != value
            ]
    return found


def rates(engine: Any) -> list[float]:
    """The learning rates of the engine's optimizers."""
    return [group["lr"] for each in _optimizers(engine) for group in each.param_groups]


def _optimizers(engine: Any) -> list[torch.optim.Optimizer]:
    return [each for each in vars(engine).values() if isinstance(each, torch.optim.Optimizer)]
