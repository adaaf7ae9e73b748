"""Lesson 02's first exercise: the target for memory, which a ring reaches that adds in place."""

from collections.abc import Callable

import torch

from zerolab import ring
from zerolab.course.attempts import attempt
from zerolab.course.let_go import handles_that_let_go
from zerolab.course.peak import Peak
from zerolab.course.targets import Reached, silver

RANKS, NUMEL, ITEM = 4, 1001, 8


def held_too_much(fn: Callable) -> Reached | None:
    """Whether a right reduce-scatter holds more than two chunks beside its tensor on some rank."""
    allowed = 2 * ring.chunks(NUMEL, RANKS)[0].stop * ITEM
    if max(attempt(_held, [(fn,)] * RANKS).values, default=0) <= allowed:
        return None
    outcome = attempt(_held_without_handles, [(fn,)] * RANKS)
    for rank, held in enumerate(outcome.values):
        if held > allowed:
            full = "a second one of full size" if held >= NUMEL * ITEM else "more than two chunks"
            return silver(
                f"rank {rank} of {RANKS} holds {held} bytes at once beside the tensor of {NUMEL * ITEM}, "
                f"{full}. Add into slices of the tensor, and receive into one buffer of a chunk"
            )
    return None


def _held(fn: Callable) -> int:
    """In the worker: the most bytes that fn holds at once beside the tensor that it is given."""
    tensor = torch.ones(NUMEL, dtype=torch.float64)
    with Peak([tensor]) as peak:
        fn(tensor)
    return peak.nbytes


def _held_without_handles(fn: Callable) -> int:
    """In the worker: the same, where a handle that was waited for keeps no tensor."""
    with handles_that_let_go():
        return _held(fn)
