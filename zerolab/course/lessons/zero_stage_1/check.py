"""Lesson 04's exercise: a ZeRO-1 step on a flat buffer, graded on values, on state and on bytes sent.

An unsharded AdamW has the right values, so values alone are not enough.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from zerolab.course.alive import Alive, nbytes
from zerolab.course.attempts import Attempt, attempt
from zerolab.course.evidence import Finding, examine, first_wrong
from zerolab.course.exercise import graded
from zerolab.course.lessons.zero_stage_1 import gradients, kept, sharing, traffic
from zerolab.course.lessons.zero_stage_1.held import held_too_much
from zerolab.course.lessons.zero_stage_1.solution import MyZero1
from zerolab.course.lessons.zero_stage_1.updates import Updated, Watch, wrong_update
from zerolab.course.lessons.zero_stage_1.world import LR, MISTAKES, RATES, STEPS, Mistake, World, mean
from zerolab.course.reading import Parts

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
    """What one rank ended with: parameters, optimizer state, what else it holds.

    `ends`: flat at the end of each training step.
    """

    flat: torch.Tensor
    ends: list[np.ndarray]
    state: kept.State
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
    flat, sizes, ends = world.start, [], []
    held: dict[int, torch.Tensor] = {}
    alive, watch = Alive(), Watch(flat)
    with watch.watched():
        mine = cls(flat, world.optimizer_class, LR)
        for step in range(STEPS):
            watch.training_step = step
            before, held = set(held), {}
            mine.step(world.gradient(step, rank))
            ends.append(flat.detach().numpy().copy())
            held = alive.storages()
            sizes.append(nbytes(held))
    new = [tensor for key, tensor in held.items() if key not in before]
    whole = [t for t in held.values() if t.untyped_storage().nbytes() >= flat.nbytes]
    return Ended(
        flat.detach().clone(),
        ends,
        kept.state(),
        min(after - before for before, after in pairwise(sizes)),
        len(whole),
        kept.name_of(new, mine) or kept.name_of(whole, mine),
        watch.seen,
        kept.state_copy(held, mine),
    )


def _look(cls: Callable, world: World) -> Finding:
    where = f"{world.world_size} rank{'s' * (world.world_size > 1)}, {world.numel} elements, "
    where += world.optimizer_class.__name__
    ranks = range(world.world_size)
    outcome = attempt(_train, [(cls, world, rank) for rank in ranks])
    if stopped := _stopped(outcome, world):
        return Finding(where, stopped)
    flats = [ended.flat for ended in outcome.values]
    other_rate = any("lr=" in ended.updated.options for ended in outcome.values)
    finding = Finding(
        where,
        None,
        flats,
        [world.trained(mean)] * world.world_size,
        _values(MISTAKES | RATES if other_rate else MISTAKES, world),
        cost=_too_much(outcome, world),
        also=outcome.hint_of_calls or _differing(flats),
        cause=_state_is_wrong(world),
    )
    if not finding.wrong:
        if late := sharing.between(world, [ended.ends for ended in outcome.values]):
            return Finding(where, late)
        return finding
    return _explained(finding, outcome, world)


def _stopped(outcome: Attempt, world: World) -> str | None:
    """A crash, a hang, a stub, or a message that was not waited for."""
    if outcome.failure:
        return outcome.failure + traffic.of_failure(outcome, world)
    if outcome.engine:
        return "that uses zerolab's own ZeroOptimizer, which is what you write here"
    unchanged = all(torch.equal(ended.flat, world.start) for ended in outcome.values)
    if not any(outcome.calls) and unchanged and world.world_size > 1:
        return "not written yet: nothing was sent and flat is what it was"
    return outcome.unsound


def _explained(finding: Finding, outcome: Attempt, world: World) -> Finding:
    """Why the parameters are wrong: the optimizers, then their gradients, then what follows the update."""
    updated = [ended.updated for ended in outcome.values]
    ends = [ended.ends for ended in outcome.values]
    unchanged = all(torch.equal(ended.flat, world.start) for ended in outcome.values)
    ring = world.numel in traffic.sizes(outcome, world).values()
    given = gradients.given(world, updated)
    wrong = (
        traffic.of_another_size(outcome, world)
        or wrong_update(world, updated, unchanged, ring)
        or (given and (gradients.wrong_step(world, given) or gradients.wrong_chunk(world, given)))
        or (sharing.put_back(world, updated, ends) if unchanged else None)
        or (given and world.world_size > 1 and sharing.averaged(world, given, updated, ends))
    )
    if wrong:
        return Finding(finding.where, "; ".join(filter(None, [wrong, outcome.hint_of_calls])))
    if finding.fitting():
        return finding
    if updated[0].options:
        why = f"the optimizer was built with {updated[0].options}: pass on lr=lr and no more"
        return Finding(finding.where, why)
    if given and (of_gradients := gradients.finding(world, given, finding)):
        return of_gradients
    if again := sharing.changed_again(world, updated, ends):
        return Finding(finding.where, again)
    return first_wrong((_of_chunk(finding, world, owner) for owner in range(world.world_size)), finding)


def _values(mistakes: Mapping[str, Mistake], world: World) -> dict[str, list[torch.Tensor]]:
    """What all ranks end with, by the mistake."""
    return {why: [value(world, rank) for rank in range(world.world_size)] for why, value in mistakes.items()}


def _differing(flats: list[torch.Tensor]) -> str | None:
    differ = any(not torch.equal(flat, flats[0]) for flat in flats)
    return "the ranks end with different parameters" if differ else None


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


def _too_much(outcome: Attempt, world: World) -> str | None:
    """What is wrong although the parameters are right."""
    return (
        kept.whole_state(outcome, world)
        or kept.parked(outcome, world)
        or traffic.too_much_sent(outcome, world)
    )
