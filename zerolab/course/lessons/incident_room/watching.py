"""Lesson 09: what the notebook shows of a job: its losses, its parameters, and what each rank sent."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import zerolab
from zerolab.course.attempts import attempt
from zerolab.course.lessons.incident_room.room import RANKS, Case, batches
from zerolab.course.lessons.incident_room.runs import Seen, train


def watch(engine: Callable, steps: int = 40, gathers: bool = False, **case: Any) -> list[Seen]:
    """Run the job with an engine on four ranks, and return what each rank saw."""
    return zerolab.launch(_on_rank, RANKS, engine, Case(RANKS, steps=steps, **case), None, gathers)


def watch_resume(engine: Callable, resumed_on: int, steps: int = 5) -> tuple[list[Seen], list[Seen]]:
    """The same, then save, and as many steps with a new engine on `resumed_on` ranks that loads."""
    case = Case(RANKS, steps=steps, resumed_on=resumed_on)
    before = zerolab.launch(_on_rank, RANKS, engine, case)
    again = before[0].flat, [seen.saved for seen in before]
    return before, zerolab.launch(_on_rank, resumed_on, engine, case, again)


def _on_rank(engine: Callable, case: Case, again: tuple | None = None, gathers: bool = False) -> Seen:
    return train(engine, case, dist.get_rank(), again, gathers)


def curve(ranks: list[Seen]) -> list[float]:
    """The loss of every step: the mean over the samples of all ranks."""
    samples = sum(seen.samples for seen in ranks)
    return [sum(step) / samples for step in zip(*(seen.errors for seen in ranks), strict=True)]


def exam(flat: torch.Tensor) -> float:
    """The loss of samples that nobody trains on."""
    return float(batches(Case(RANKS), RANKS)[0].loss(flat))


def report(engine: Callable) -> list[str]:
    """What each rank was sending first, where a job whose engine gets parameters by name died."""
    case = Case(RANKS, by_name=True)
    outcome = attempt(train, [(engine, case, rank) for rank in range(RANKS)])
    first = [own[0] for own in outcome.messages]
    return [f"rank {rank}: {call.call} sends {call.numel} elements" for rank, call in enumerate(first)]
