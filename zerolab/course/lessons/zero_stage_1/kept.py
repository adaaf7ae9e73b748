"""Lesson 04's exercise: what a rank keeps between the steps: the optimizer's state, copies and histories."""

import gc
from typing import Any, NamedTuple

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


class State(NamedTuple):
    """All optimizers' state: its bytes (None without any), and the types and names of its tensors."""

    nbytes: int | None
    types: set[torch.dtype]
    names: list[str]


def state() -> State:
    """Look at the state of all optimizers."""
    states = _states()
    found = [(str(name), value) for each in states for name, value in each.items() if torch.is_tensor(value)]
    tensors = [(name, tensor) for name, tensor in found if tensor.numel() > 1]
    return State(
        storage_bytes(tensor for _, tensor in found) if states else None,
        {tensor.dtype for _, tensor in tensors},
        sorted({name for name, _ in tensors}),
    )


def whole_state(outcome: Attempt, world: World) -> str | None:
    """Whether a rank has more state than its share, and what it is of."""
    if world.optimizer_class is torch.optim.SGD or world.world_size == 1:
        return None
    share = 8 * world.numel / world.world_size
    for rank, ended in enumerate(outcome.values):
        if ended.state.nbytes is None:
            return "no optimizer holds any state: build optimizer_class([shard], lr=lr) once, and keep it"
        if ended.state.nbytes > 1.1 * share + 64:
            more, advice = _reading(ended)
            return (
                f"the parameters are right, but {more}: rank {rank} holds {ended.state.nbytes:,} "
                f"bytes of state, and m and v of its share have 8Ψ/N = {share:,.0f}. {advice}"
            )
    return None


def _reading(ended: Any) -> tuple[str, str]:
    """Why there is more state than a share's, and what to do."""
    state: State = ended.state
    if options := ended.updated.options:
        return f"the optimizer was built with {options}", "Pass on lr=lr and no more"
    if state.types - {torch.float32}:
        kinds = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in state.types))
        advice = f"It is in {kinds}: give the optimizer a shard in float32"
        return "the optimizer's state has another type than flat", advice
    if set(state.names) > ADAMS:
        *names, last = state.names
        advice = f"It has {', '.join(names)} and {last}: keep what the optimizer makes, and no more"
        return "the optimizer's state has more than m and v", advice
    return "the state is not sharded", "Give the optimizer your shard, not flat"


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
