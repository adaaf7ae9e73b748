"""Lesson 04's exercise: what a rank keeps between the steps: the optimizer's state, copies and histories."""

import gc
from typing import Any

import torch

from zerolab.course.alive import first_name, kept_by
from zerolab.course.attempts import Attempt
from zerolab.course.lessons.zero_stage_1.world import World
from zerolab.storages import storage_bytes

ADAMS = {"exp_avg", "exp_avg_sq"}
"""The names of m and v in the state of torch's Adam and AdamW."""


def name_of(tensors: list[torch.Tensor], mine: Any) -> str | None:
    """The name under which `mine` keeps one of the tensors, other than as a gradient."""
    names = (kept_by(tensor, self=mine) for tensor in tensors)
    return first_name(name for name in names if name and not name.endswith(".grad"))


def state_copy(held: dict[int, torch.Tensor], mine: Any) -> str | None:
    """The name of a tensor that equals a tensor of the optimizer's state and is another one."""
    states = [t for state in _states() for t in state.values() if torch.is_tensor(t) and t.numel() > 1]
    own = {state.untyped_storage()._cdata for state in states}
    others = [tensor for key, tensor in held.items() if key not in own]
    return name_of([t for t in others if any(_equal(t, state) for state in states)], mine)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.dtype, one.device) == (other.dtype, other.device)  # else torch.equal raises an error
    return alike and torch.equal(one, other)


def _states() -> list[dict[str, Any]]:
    """The state of all optimizers that are alive, wherever the reader keeps them."""
    gc.collect()
    optimizers = [thing for thing in gc.get_objects() if isinstance(thing, torch.optim.Optimizer)]
    return [state for optimizer in optimizers for state in optimizer.state.values()]


def _tensors() -> list[torch.Tensor]:
    return [tensor for state in _states() for tensor in state.values() if torch.is_tensor(tensor)]


def state_bytes() -> int | None:
    """The bytes of all state, or None if no optimizer has any."""
    return storage_bytes(_tensors()) if _states() else None


def state_types() -> set[torch.dtype]:
    """The types of the state's tensors, without counters."""
    return {tensor.dtype for tensor in _tensors() if tensor.numel() > 1}


def state_names() -> list[str]:
    """The names of the state's tensors, without counters."""
    items = (item for state in _states() for item in state.items())
    return sorted({str(name) for name, value in items if torch.is_tensor(value) and value.numel() > 1})


def whole_state(outcome: Attempt, world: World) -> str | None:
    """Whether a rank has more state than its share, and what it is of."""
    if world.optimizer_class is torch.optim.SGD or world.world_size == 1:
        return None
    share = 8 * world.numel / world.world_size
    for rank, ended in enumerate(outcome.values):
        if ended.state_bytes is None:
            return "no optimizer holds any state: build optimizer_class([shard], lr=lr) once, and keep it"
        if ended.state_bytes > 1.1 * share + 64:
            return (
                f"the parameters are right, but {_more(ended)}: rank {rank} holds {ended.state_bytes:,} "
                f"bytes of state, and m and v of its share have 8Ψ/N = {share:,.0f}. {_advice(ended)}"
            )
    return None


def _more(ended: Any) -> str:
    if ended.updated.options:
        return f"the optimizer was built with {ended.updated.options}"
    if ended.state_types - {torch.float32}:
        return "the optimizer's state has another type than flat"
    if set(ended.state_names) > ADAMS:
        return "the optimizer's state has more than m and v"
    return "the state is not sharded"


def _advice(ended: Any) -> str:
    if ended.updated.options:
        return "Pass on lr=lr and no more"
    if ended.state_types - {torch.float32}:
        kinds = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in ended.state_types))
        return f"It is in {kinds}: give the optimizer a shard in float32"
    if set(ended.state_names) > ADAMS:
        *names, last = ended.state_names
        return f"It has {', '.join(names)} and {last}: keep what the optimizer makes, and no more"
    return "Give the optimizer your shard, not flat"


def parked(outcome: Attempt, world: World) -> str | None:
    """A copy of the state, copies that grow, or more whole ones than a padded buffer and a gradient."""
    for rank, ended in enumerate(outcome.values):
        kept = f"the parameters are right, but rank {rank} keeps"
        name = f" (look at `{ended.name}`)" if ended.name else ""
        if ended.grown_bytes >= 4 * world.numel / world.world_size and world.numel >= 64:
            return f"{kept} {ended.grown_bytes:,} bytes more after every step{name}: keep no history"
        if ended.state_copy:
            return f"{kept} a copy of the optimizer's state in `{ended.state_copy}`: keep the state once"
        if ended.whole_copies > 2 and world.world_size > 2 and world.numel >= 64:
            return (
                f"{kept} {ended.whole_copies} tensors as large as flat beside it{name}: m, v and masters are "
                "1/N large"
            )
    return None
