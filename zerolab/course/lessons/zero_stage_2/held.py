"""Lesson 05's second exercise: the target for memory, a call without a second whole gradient."""

from collections.abc import Callable

import torch

from zerolab.course.attempts import attempt
from zerolab.course.peak import Peak
from zerolab.course.targets import Reached, silver

RANKS, SHARD, ITEM = 4, 96, 8
WHOLE = RANKS * SHARD * ITEM


def held_too_much(fn: Callable) -> Reached | None:
    """Whether a right call has a tensor as large as flat, beside flat and kept, on some rank."""
    outcome = attempt(_largest, [(fn,)] * RANKS)
    for rank, largest in enumerate(outcome.values):
        if largest >= WHOLE:
            return silver(
                f"with {RANKS} ranks, rank {rank} has a tensor of {largest} bytes in a call, beside flat, "
                f"which has {WHOLE}. Reduce flat in place, and clone no more than the shard"
            )
    return None


def _largest(fn: Callable) -> int:
    """In the worker: the bytes of the largest tensor in the second call beside those that it is given."""
    flats = [torch.ones(RANKS * SHARD, dtype=torch.float64) for _ in range(2)]
    kept = fn(flats[0], None)
    with Peak([flats[1], kept]) as peak:
        fn(flats[1], kept)
    return peak.largest
