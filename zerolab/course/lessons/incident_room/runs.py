"""Lesson 09: run the job with an engine in a worker process, and note what one rank sees of it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

import zerolab
from zerolab.course.alive import Alive
from zerolab.course.lessons.incident_room.held import (
    ITEM,
    Held,
    behind,
    held,
    momenta,
    rates,
    settings,
    state,
    tensors,
)
from zerolab.course.lessons.incident_room.room import LR, PSI, Case, batches, named, start
from zerolab.course.messages import Message, sent_bytes
from zerolab.course.wire import Wire

LOOKED_AT = 2  # steps, of whose backwards the parameters are kept


class Seen(NamedTuple):
    """What one rank saw of a run.

    Attributes:
        errors: the squared errors of its samples, added up, in each step's backward.
        samples: how many it has.
        flat, after: its parameters after the last step, and after the first two.
        passes: what it sent in each step, in Ψ by the paper's count: an all-gather is Ψ.
        kept: bytes that the engine keeps, by name, before each micro-batch of the last step, and after it.
        state: elements of optimizer state, in all of the engine's optimizers.
        logs: what `engine.log` held after each step, where the engine has one.
        saved: what `save` returned, where the case is resumed.
        saving: what it sent for that, in Ψ, by the function that sent it.
        loaded: the momentum of each of its shards right after `load`.
        calls: what it sent in the last step, in Ψ, by the function that sent it.
        rates: the learning rates of the engine's optimizers.
        settings: how the engine's optimizers differ from the ticket's.
        used: by micro-batch, the parameters that each of its first backwards ran with.
        backwards: by micro-batch, how often its backward ran.
        forwards: how often a loss was computed, in all steps.
        given: the parameters that the engine was given.
        begun: those before the first step, and after `load` where there is one.
        momentum: of each of its shards, at the end.
        held: what was in memory, at the moments of `kept`.
        behind: elements in the storages of these momenta.
        replaced: whether the engine's `flat` is another tensor than the one that it was given.
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
    saving: Mapping[str, float] = {}
    loaded: Sequence[torch.Tensor | None] = ()
    calls: Mapping[str, float] = {}
    rates: Sequence[float] = ()
    settings: Sequence[str] = ()
    used: Sequence[Sequence[torch.Tensor]] = ()
    backwards: Sequence[int] = ()
    forwards: int = 0
    given: torch.Tensor = torch.empty(0)
    begun: torch.Tensor = torch.empty(0)
    momentum: Sequence[torch.Tensor | None] = ()
    held: Sequence[Held] = ()
    behind: int = 0
    replaced: bool = False


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
    run = Run(engine, case, rank, again, gathers)
    for step in range(case.steps):
        run.step(step, memory and step == case.steps - 1)
    return run.seen(case.resumed_on > 0 and not again)


class Run:
    """The job with an engine, and what is noted of it.

    Attributes: given, what the engine got, while the job keeps it; mine, the engine; data, the rank's
    batches; others as in Seen.
    """

    def __init__(self, engine: Callable, case: Case, rank: int, again: tuple | None, gathers: bool):
        flat, files = tree_map(_on_device, again or (start(), None))
        self.data, self.gathers, self.alive = batches(case, rank), gathers, Alive()
        self.given = named(case, flat) if case.by_name else flat.clone()
        self.mine = engine(self.given, LR)
        self.before = torch.cat(tensors(self.given)).clone()
        if again:
            self.mine.load(tree_map(_copy, files))  # new tensors, so that those which are kept are seen
        self.begun = torch.cat(tensors(self.given)).clone()
        self.loaded = momenta(self.mine) if again else ()
        if gathers:
            self.given = {}  # an engine of shards keeps nothing of it, and the job does not either

        self.after: list[torch.Tensor] = []
        self.passes: list[float] = []
        self.logs: list[Any] = []
        self.held: list[Held] = []
        self.calls: dict[str, float] = {}

    def whole(self) -> torch.Tensor:
        """All parameters. A copy gathers, so that an engine which keeps that does not save its own gather."""
        found = copy.copy(self.mine).gather() if self.gathers else self.given
        return torch.cat(tensors(found)).detach().clone()

    def look(self) -> None:
        """Note what is in memory."""
        ours = [self.before, self.begun, *self.after, *(flat for batch in self.data for flat in batch.used)]
        parameters = [self.begun, *self.after][-1]
        self.held.append(held(self.alive, self.mine, [*tensors(self.given), *ours], parameters))

    def step(self, number: int, memory: bool) -> None:
        """Take a step. `memory`: look at what is in memory before each micro-batch."""
        for batch in self.data:
            batch.watch = self.look if memory else batch.watch
        with Wire() as wire:
            self.mine.step(self.data)
        self.calls = _passes(wire.messages)
        self.passes.append(sum(self.calls.values()))
        self.logs.append(getattr(self.mine, "log", None))
        self.after += [self.whole()] if number < LOOKED_AT else []
        if memory:
            self.look()

    def seen(self, saves: bool) -> Seen:
        """All that was noted. `saves`: and what save returns."""
        return Seen(
            errors=[sum(step) for step in zip(*(batch.errors for batch in self.data), strict=False)],
            samples=sum(map(len, self.data)),
            flat=self.whole(),
            after=self.after,
            passes=self.passes,
            kept=[each.kept for each in self.held],
            state=state(self.mine),
            logs=self.logs,
            **(self._saved() if saves else {}),
            loaded=self.loaded,
            calls=self.calls,
            rates=rates(self.mine),
            settings=settings(self.mine),
            used=[batch.used[:LOOKED_AT] for batch in self.data],
            backwards=[len(batch.used) for batch in self.data],
            forwards=sum(batch.forwards for batch in self.data),
            given=self.before,
            begun=self.begun,
            momentum=momenta(self.mine),
            held=self.held,
            behind=behind(self.mine),
            replaced=self._replaced(),
        )

    def _saved(self) -> dict[str, Any]:
        """What save returns, and what it sends."""
        with Wire() as wire:
            saved = self.mine.save()
        return {"saved": saved, "saving": _passes(wire.messages)}

    def _replaced(self) -> bool:
        flat, given = getattr(self.mine, "flat", None), self.given
        if not isinstance(flat, torch.Tensor) or not isinstance(given, torch.Tensor):
            return False
        return flat.untyped_storage()._cdata != given.untyped_storage()._cdata


def _passes(messages: Sequence[Message]) -> dict[str, float]:
    """What was sent, in Ψ, by the function that sent it."""
    n = dist.get_world_size()
    by_call = {call: [each for each in messages if each.call == call] for call in (m.call for m in messages)}
    return {call: sent_bytes(own, n) / (ITEM * PSI * (n - 1) / n) for call, own in by_call.items()}


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _on_device(leaf: Any) -> Any:
    """A tensor on the rank's device: what ranks return comes back on the CPU."""
    return leaf.to(zerolab.device()) if isinstance(leaf, torch.Tensor) else leaf
