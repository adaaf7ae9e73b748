"""Lesson 04's exercise: a ZeRO-1 step on a flat buffer, graded on values, on state and on bytes sent.

An unsharded AdamW has the right values, so values alone are not enough.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from zerolab.course.alive import Alive, first_name, kept_by, nbytes
from zerolab.course.attempts import Attempt, attempt
from zerolab.course.evidence import Finding, examine, first_wrong
from zerolab.course.exercise import graded
from zerolab.course.lessons.zero_stage_1.held import held_too_much
from zerolab.course.lessons.zero_stage_1.solution import MyZero1
from zerolab.course.lessons.zero_stage_1.updates import Updated, Watch, wrong_update
from zerolab.course.lessons.zero_stage_1.world import LR, MISTAKES, STEPS, World, mean
from zerolab.course.reading import Parts
from zerolab.course.wire import sent_bytes
from zerolab.storages import storage_bytes

# SGD first: its step depends on the gradient's scale, Adam's does not. Then state, then remainders.
CASES = (
    World(3, 999, torch.optim.SGD),
    World(4, 1000, torch.optim.AdamW),
    World(4, 1001, torch.optim.AdamW),
    World(2, 64, torch.optim.AdamW),
    World(4, 9, torch.optim.SGD),
    World(4, 10, torch.optim.SGD),
    World(3, 11, torch.optim.SGD),
    World(1, 10, torch.optim.AdamW),
)
HINTS = (
    "your part is ring.chunks(flat.numel(), N)[rank]. Give the optimizer flat[your part] alone: a view, so "
    "that an update of the shard is an update of flat.",
    "three lines make a step: a reduce-scatter of the gradient, the optimizer's step, an all-gather of flat.",
    "ring.reduce_scatter returns your chunk of the sum. Divide it by N, make it the shard's .grad, step, "
    "and call ring.all_gather(self.flat).",
)


class Ended(NamedTuple):
    """What one rank ended with: parameters, bytes of optimizer state (None if none), what else it holds."""

    flat: torch.Tensor
    state_bytes: int | None
    grown_bytes: int
    whole_copies: int
    name: str | None
    updated: Updated
    state_copy: str | None


@graded(
    "Gold: your stage 1 is right on 1 to 4 ranks: the same parameters on every rank, the remainder too, "
    "8Ψ/N bytes of state, 2Ψ sent, and no second whole buffer in a step.",
    call="MyZero1(flat, optimizer_class, lr)",
    hints=HINTS,
    solution=[MyZero1],
)
def check_zero1(cls: Callable) -> str | None:
    """Train with cls(flat, optimizer_class, lr) on 1 to 4 ranks and print the mistake, or that there is none.

    cls.step(gradient) gets this rank's own gradient. Afterwards `flat` holds the updated parameters on every
    rank, each rank keeps 1/N of the optimizer's state, and no more than 2Ψ elements are sent.
    """
    return examine(CASES, partial(_look, cls)) or held_too_much(cls)


def _train(cls: Callable, world: World, rank: int) -> Ended:
    """In the worker: three steps with the reader's class, then a look at what it holds."""
    flat, sizes = world.start, []
    held: dict[int, torch.Tensor] = {}
    alive, watch = Alive(), Watch(flat)
    with watch.watched():
        mine = cls(flat, world.optimizer_class, LR)
        for step in range(STEPS):
            before, held = set(held), {}
            mine.step(world.gradient(step, rank))
            held = alive.storages()
            sizes.append(nbytes(held))
    new = [tensor for key, tensor in held.items() if key not in before]
    whole = [t for t in held.values() if t.untyped_storage().nbytes() >= flat.nbytes]
    grown = min(after - before for before, after in pairwise(sizes))
    return Ended(
        flat.detach().clone(),
        _state_bytes(),
        grown,
        len(whole),
        _name(new, mine) or _name(whole, mine),
        watch.seen,
        _state_copy(held, mine),
    )


def _name(tensors: list[torch.Tensor], mine: Any) -> str | None:
    """The name under which `mine` keeps one of the tensors, other than as a gradient."""
    names = (kept_by(tensor, self=mine) for tensor in tensors)
    return first_name(name for name in names if name and not name.endswith(".grad"))


def _state_copy(held: dict[int, torch.Tensor], mine: Any) -> str | None:
    """The name of a tensor that equals a tensor of the optimizer's state and is another one."""
    states = [t for state in _states() for t in state.values() if torch.is_tensor(t) and t.numel() > 1]
    own = {state.untyped_storage()._cdata for state in states}
    others = [tensor for key, tensor in held.items() if key not in own]
    return _name([t for t in others if any(_equal(t, state) for state in states)], mine)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.dtype, one.device) == (other.dtype, other.device)  # else torch.equal raises an error
    return alike and torch.equal(one, other)


def _states() -> list[dict[str, Any]]:
    """The state of all optimizers that are alive, wherever the reader keeps them."""
    gc.collect()
    optimizers = [thing for thing in gc.get_objects() if isinstance(thing, torch.optim.Optimizer)]
    return [state for optimizer in optimizers for state in optimizer.state.values()]


def _state_bytes() -> int | None:
    states = _states()
    tensors = (t for state in states for t in state.values() if torch.is_tensor(t))
    return storage_bytes(tensors) if states else None


def _look(cls: Callable, world: World) -> Finding:
    where = f"{world.world_size} ranks, {world.numel} elements, {world.optimizer_class.__name__}"
    ranks = range(world.world_size)
    outcome = attempt(_train, [(cls, world, rank) for rank in ranks])
    if outcome.failure:
        return Finding(where, outcome.failure + _of_another_cut(outcome.failure))
    if outcome.engine:
        return Finding(where, "that uses zerolab's own ZeroOptimizer, which is what you write here")
    flats = [ended.flat for ended in outcome.values]
    unchanged = all(torch.equal(flat, world.start) for flat in flats)
    if not any(outcome.calls) and unchanged:
        return Finding(where, "not written yet: nothing was sent and flat is what it was")
    finding = Finding(
        where,
        None,
        flats,
        [world.trained(mean)] * world.world_size,
        {why: [value(world, rank) for rank in ranks] for why, value in MISTAKES.items()},
        cost=_whole_state(outcome, world) or _parked(outcome, world) or _too_much_sent(outcome, world),
        also=outcome.hint_of_calls or _differing(flats),
        cause=_state_is_wrong(world),
    )
    if not finding.wrong:
        return finding
    updated = [ended.updated for ended in outcome.values]
    if wrong := wrong_update(world, updated, unchanged):
        return Finding(where, wrong)
    if finding.fitting():
        return finding
    if updated[0].options:
        return Finding(where, f"the optimizer was built with {updated[0].options}: pass on lr=lr and no more")
    return _one_chunk(finding, world)


def _of_another_cut(failure: str) -> str:
    """What to do where the gradient's chunk and the shard differ in length."""
    if "assign a gradient of size" not in failure:
        return ""
    return (
        ". ring.reduce_scatter returns the chunk that ring.chunks cuts, and these differ by one element at "
        "most: cut the shard with ring.chunks, too. torch.chunk cuts elsewhere"
    )


def _differing(flats: list[torch.Tensor]) -> str | None:
    differ = any(not torch.equal(flat, flats[0]) for flat in flats)
    return "the ranks end with different parameters" if differ else None


def _one_chunk(finding: Finding, world: World) -> Finding:
    """The same for the first chunk that is wrong."""
    return first_wrong((_of_chunk(finding, world, owner) for owner in range(world.world_size)), finding)


def _of_chunk(finding: Finding, world: World, owner: int) -> Finding:
    """The same for one rank's chunk, taken apart into the gradients of ranks and steps."""
    own = lambda value: value[world.cut(owner)]
    part = finding.part(f"rank {owner}'s chunk of flat", own, lambda rank: _parts(world, owner))
    return replace(part, owner=owner)


def _parts(world: World, owner: int) -> Sequence[Parts]:
    """What a chunk of flat is a sum of after steps of SGD: gradients of that chunk, else of any chunk."""
    begin = {"the first parameters": world.start[world.cut(owner)]}
    cases = [(step, rank) for step in range(STEPS) for rank in range(world.world_size)]
    updates = lambda chunk: {
        f"rank {rank}'s gradient of step {step}" + f" at chunk {chunk}" * (chunk != owner): -LR
        * world.gradient(step, rank)[world.cut(chunk)]
        for step, rank in cases
    }
    anywhere = {name: part for chunk in range(world.world_size) for name, part in updates(chunk).items()}
    return [begin | updates(owner), begin | anywhere]


def _state_is_wrong(world: World) -> str | None:
    """What is left if SGD, which came before, was right on as many elements."""
    if world.optimizer_class is torch.optim.SGD or world.numel % world.world_size:
        return None
    return (
        "all is right with SGD and wrong with AdamW: so the gradients are right, and the optimizer's state "
        "is not. Keep one optimizer for all steps, give it your shard alone, and step it once with the mean "
        "gradient"
    )


def _whole_state(outcome: Attempt, world: World) -> str | None:
    if world.optimizer_class is torch.optim.SGD or world.world_size == 1:
        return None
    share = 8 * world.numel / world.world_size
    for rank, ended in enumerate(outcome.values):
        if ended.state_bytes is None:
            return "no optimizer holds any state: build optimizer_class([shard], lr=lr) once, and keep it"
        if ended.state_bytes > 1.1 * share + 64:
            return (
                f"the parameters are right, but the state is not sharded: rank {rank} holds "
                f"{ended.state_bytes:,} bytes of m and v, and its share is 8Ψ/N = {share:,.0f}. Give the "
                "optimizer your shard, not flat"
            )
    return None


def _parked(outcome: Attempt, world: World) -> str | None:
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


def _too_much_sent(outcome: Attempt, world: World) -> str | None:
    """Right and sharded, but more bytes than two passes over the model."""
    ring_pass = 4 * world.numel * (world.world_size - 1) / world.world_size
    for rank, messages in enumerate(outcome.messages):
        passes = sent_bytes(messages, world.world_size) / STEPS / ring_pass if ring_pass else 0
        if passes > 2.1 and world.numel >= 64:
            calls = ", ".join(sorted({message.call for message in messages}))
            return (
                f"right and sharded, but rank {rank} moves {passes:.1f}Ψ a step ({calls}) where 2Ψ is "
                "enough. An all-reduce gives every rank the whole gradient, and each needs 1/N of it: use "
                "its first half, the reduce-scatter"
            )
    return None
