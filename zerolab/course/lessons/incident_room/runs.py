"""Lesson 09: run the job with an engine in a worker process, and note what one rank sees of it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

import zerolab
from zerolab.course.alive import Alive
from zerolab.course.lessons.incident_room.held import ITEM, kept_bytes, momenta, rates, state, tensors
from zerolab.course.lessons.incident_room.room import LR, PSI, Case, batches, named, start
from zerolab.course.wire import Message, Wire, sent_bytes


class Seen(NamedTuple):
    """What one rank saw of a run.

    Attributes:
        errors: the squared errors of its samples, added up, in each step's backward.
        samples: how many it has.
        flat, after: its parameters after the last step, and after the first two.
        passes: what it sent in each step, in Ψ by the paper's count: an all-gather is Ψ.
        calls: the same of the last step, by the function that sent it.
        rates: the learning rates of the engine's optimizers.
        kept: bytes that the engine keeps, by name, before each micro-batch of the last step, and after it.
        state: elements of optimizer state, in all of the engine's optimizers.
        logs: what `engine.log` held after each step, where the engine has one.
        saved: what `save` returned, where the case is resumed.
        loaded: the momentum of each of its shards right after `load`.
    """

    errors: list[float]
    samples: int
    flat: torch.Tensor
    after: list[torch.Tensor]
    passes: list[float]
    kept: list[dict[str, int]]
    state: int
    logs: list[Any]
    saved: Any = None
    loaded: Sequence[torch.Tensor | None] = ()
    calls: Mapping[str, float] = {}
    rates: Sequence[float] = ()


def train(
    engine: Callable,
    case: Case,
    rank: int,
    again: tuple | None = None,
    gathers: bool = False,
    memory: bool = True,
) -> Seen:
    """In the worker: run the job with an engine. `again`: the parameters and files to resume from.

    `gathers`: whether the parameters are read with `gather()`, because no rank has them whole. `memory`:
    whether to look at what the engine keeps, which takes time.
    """
    flat, files = tree_map(_on_device, again or (start(), None))
    given = named(case, flat) if case.by_name else flat.clone()
    alive, data, kept = Alive(), batches(case, rank), []
    mine = engine(given, LR)
    if again:
        mine.load(files)
    loaded = momenta(mine) if again else ()
    passes, logs, after = [], [], []
    # A copy gathers, so that an engine which keeps what it gathered does not save a gather of its own.
    whole = lambda: torch.cat(tensors(copy.copy(mine).gather() if gathers else given)).detach().clone()
    look = lambda: kept.append(kept_bytes(alive, mine, given))
    for step in range(case.steps):
        for batch in data:
            batch.watch = look if memory and step == case.steps - 1 else batch.watch
        with Wire() as wire:
            mine.step(data)
        calls = _passes(wire.messages)
        passes.append(sum(calls.values()))
        logs.append(getattr(mine, "log", None))
        after += [whole()] if step < 2 else []
    if memory:
        look()
    last = whole()
    saved = mine.save() if case.resumed_on and not again else None
    errors = [sum(step) for step in zip(*(batch.errors for batch in data), strict=False)]
    seen = errors, sum(map(len, data)), last, after, passes, kept, state(mine), logs, saved, loaded
    return Seen(*seen, calls, rates(mine))


def _passes(messages: Sequence[Message]) -> dict[str, float]:
    """What was sent, in Ψ, by the function that sent it."""
    n = dist.get_world_size()
    by_call = {call: [each for each in messages if each.call == call] for call in (m.call for m in messages)}
    return {call: sent_bytes(own, n) / (ITEM * PSI * (n - 1) / n) for call, own in by_call.items()}


def _on_device(leaf: Any) -> Any:
    """A tensor on the rank's device: what ranks return comes back on the CPU."""
    return leaf.to(zerolab.device()) if isinstance(leaf, torch.Tensor) else leaf
