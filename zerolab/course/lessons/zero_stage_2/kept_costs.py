"""Lesson 05's second exercise: what a right answer keeps in memory, and what it sends."""

from itertools import pairwise
from typing import NamedTuple

import torch

from zerolab.course.attempts import Attempt, Odd
from zerolab.course.lessons.zero_stage_2.kept_sums import ITEM, MICRO_BATCHES, STEPS, Case


class Kept(NamedTuple):
    """What fn returned for one micro-batch, the storage behind it, and what else of fn's is in memory."""

    value: torch.Tensor | Odd
    storage_bytes: int
    other_bytes: int
    other_name: str | None


def too_much_kept(case: Case, outcome: Attempt) -> str | None:
    """A shard may be a view, which keeps the whole storage; and copies may be parked elsewhere."""
    whole = ITEM * case.numel
    for rank, steps in enumerate(outcome.values):
        right, shard_bytes = f"the values are right, but rank {rank}", ITEM * case.length(rank)
        for each in (kept for values in steps for kept in values):
            if each.storage_bytes > shard_bytes:
                return (
                    f"{right} keeps {each.storage_bytes} bytes for a shard of {shard_bytes}: it returned a "
                    "view of the whole gradient. .clone() the shard"
                )
        for values in steps:
            last = values[-1]
            grows = all(after.other_bytes > before.other_bytes for before, after in pairwise(values))
            if last.other_bytes >= whole or grows:
                name = f" in `{last.other_name}`" if last.other_name else ""
                growth = " It grows with every micro-batch." if grows else ""
                return (
                    f"{right} keeps {last.other_bytes} bytes beside its shard{name}, alive after the "
                    f"call.{growth} Keep nothing but what you return"
                )
    return None


def wrong_bytes(case: Case, outcome: Attempt, but: str = "the values are right, but") -> str | None:
    """More or less than one reduce-scatter of each micro-batch, which sends all chunks but a rank's own."""
    times = STEPS * MICRO_BATCHES
    for rank in range(case.world_size):
        sent, whole = outcome.bytes_sent(rank), times * ITEM * case.numel
        allowed = whole - times * ITEM * case.length(rank)
        right = f"{but} rank {rank} sent {sent} bytes"
        if case.even and sent == 2 * allowed:
            return (
                f"{right} where a reduce-scatter sends {allowed}: that is an all-reduce, whose second half "
                "sent sums to ranks that do not keep them"
            )
        if sent == whole * (case.world_size - 1):
            return (
                f"{right} where a reduce-scatter sends {allowed}: it sends the whole gradient to every rank"
            )
        if sent != allowed:
            types = {str(message.dtype).removeprefix("torch.") for message in outcome.messages[rank]}
            others = f", some of them in {' and '.join(sorted(types - {'float64'}))}" * (types != {"float64"})
            return (
                f"{right} in {times} micro-batches{others * bool(types)}, {sent / allowed:.3g} times the "
                f"{allowed} of one reduce-scatter each: send each chunk but your own once, in float64"
            )
    return None
