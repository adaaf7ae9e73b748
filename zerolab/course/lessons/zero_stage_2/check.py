"""Lesson 05's exercise: reduce a micro-batch's gradient, keep 1/N. Graded on values, memory and bytes."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from zerolab import ring
from zerolab.course.exercise import Attempt, attempt, graded, total

MICRO_BATCHES = 3
CASES = ((2, 8), (3, 12), (4, 8))  # (world_size, numel); a flat buffer is padded, so every shard is equal
BASE = 32  # a rank's gradient is in digits of its own, so the digits of a sum show which ranks are in it


class Kept(NamedTuple):
    """What fn returned for one micro-batch, and how large the storage behind it is."""

    value: torch.Tensor
    storage_bytes: int
    kind: str


@graded(
    "You wrote the core of stage 2: on 2, 3 and 4 ranks the sums are right after every micro-batch, 1/N of "
    "a gradient stays, and each micro-batch sends (N-1)/N of one."
)
def check_reduce_and_keep(fn: Callable) -> str | None:
    """Run fn(flat, kept) on 2 to 4 ranks, three micro-batches each, and print its mistake if it makes one.

    fn sums `flat` over the ranks, adds this rank's shard of the sum to `kept` (None at first), returns it,
    and keeps nothing else alive.
    """
    for world_size, numel in CASES:
        inputs = [
            ([gradient(rank, micro, numel) for micro in range(MICRO_BATCHES)],) for rank in range(world_size)
        ]
        outcome = attempt(partial(_step, fn), inputs)
        problem = outcome.failure or _not_written(outcome) or _not_the_ring(outcome)
        for micro in range(0 if problem else MICRO_BATCHES):
            kept = [values[micro] for values in outcome.values]
            problem = problem or _wrong_shape(kept, world_size, numel) or _wrong_value(kept, micro, numel)
        problem = problem or _too_much_kept(outcome, world_size, numel) or _wrong_bytes(outcome, numel)
        if problem:
            return f"{problem} (seen with {world_size} ranks)"
    return None


def gradient(rank: int, micro: int, numel: int) -> torch.Tensor:
    """Exact in float64, and different for every element, rank and micro-batch."""
    return (torch.arange(numel, dtype=torch.float64) + 1 + 1000 * (micro + 1)) * BASE ** (2 * rank)


def _step(fn: Callable, gradients: list[torch.Tensor]) -> list[Kept]:
    """In the worker: the accumulation loop of one step, with fn after every backward pass."""
    kept, seen = None, []
    while gradients:
        kept = fn(gradients.pop(0).clone(), kept)
        value, nbytes = torch.empty(0), 0
        if isinstance(kept, torch.Tensor):
            value, nbytes = kept.detach().clone(), kept.untyped_storage().nbytes()
        seen.append(Kept(value, nbytes, type(kept).__name__))
    return seen


def _not_written(outcome: Attempt) -> str | None:
    kinds = {kept.kind for values in outcome.values for kept in values}
    if not any(outcome.messages) and kinds == {"NoneType"}:
        return "not written yet: nothing was sent and None was returned"
    if strange := sorted(kinds - {"Tensor"}):
        return f"a rank returned {strange[0]}: return this rank's shard of the sum so far, a tensor"
    return None


def _not_the_ring(outcome: Attempt) -> str | None:
    for name in outcome.collectives:
        sends = ", which sends every sum to every rank, twice the bytes" if "allreduce" in name else ""
        return f"that calls torch's own {name}{sends}: use ring.reduce_scatter"
    return None


def _wrong_shape(kept: list[Kept], world_size: int, numel: int) -> str | None:
    lengths = [each.value.numel() for each in kept]
    if all(length == numel // world_size for length in lengths):
        return None
    if all(length == numel for length in lengths):
        kept_by_all = f"every rank keeps all {numel} elements: that is stage 1's memory"
        return f"{kept_by_all}. Keep the shard that ring.reduce_scatter returns"
    return f"the ranks keep {lengths} elements of {numel}, and a shard has {numel // world_size}"


def _wrong_value(kept: list[Kept], micro: int, numel: int) -> str | None:
    """Compare what each rank holds after micro-batch `micro` with the sum so far."""
    world_size = len(kept)
    sums = [total(gradient(rank, each, numel) for rank in range(world_size)) for each in range(micro + 1)]
    for rank, each in enumerate(kept):
        if not torch.equal(each.value, total(sums)[ring.chunks(numel, world_size)[rank]]):
            return _mistake(each.value, sums, rank, world_size)
    return None


def _mistake(value: torch.Tensor, sums: list[torch.Tensor], rank: int, world_size: int) -> str:
    """The known mistake that explains a wrong value; `sums` holds each micro-batch's sum over the ranks."""
    numel, micro = sums[0].numel(), len(sums) - 1
    pieces, right = ring.chunks(numel, world_size), total(sums)
    mine, own = pieces[rank], [gradient(rank, each, numel) for each in range(micro + 1)]
    if micro and torch.equal(value, sums[-1][mine]):
        return (
            f"after micro-batch {micro} a rank holds that micro-batch alone: the earlier ones were "
            "overwritten. Add the new shard to `kept`"
        )
    if torch.equal(value, total(own)[mine]) or torch.equal(value, own[-1][mine]):
        return f"rank {rank} holds its own gradient only, without those of the other ranks"
    if torch.allclose(value * world_size, right[mine], rtol=1e-12, atol=0.0):
        return "that is the mean over the ranks: keep the sum, and divide once, before the update"
    if any(torch.equal(value, right[piece]) for piece in pieces):
        return f"the sums are right, but rank {rank} keeps another rank's shard: its own is {mine}"
    if micro:
        return (
            f"wrong from the second micro-batch on: `kept` on rank {rank} was already a sum over the ranks, "
            "and it was reduced again. Reduce `flat` alone, then add"
        )
    return f"rank {rank}'s shard is not the sum over the ranks, from the first micro-batch on"


def _too_much_kept(outcome: Attempt, world_size: int, numel: int) -> str | None:
    """A shard may be a view, and a view keeps the storage of the whole buffer alive."""
    shard_bytes = 8 * numel // world_size
    for rank, values in enumerate(outcome.values):
        for each in values:
            if each.storage_bytes > shard_bytes:
                return (
                    f"the values are right, but rank {rank} keeps {each.storage_bytes} bytes for a shard of "
                    f"{shard_bytes}: it returned a view of the whole gradient. .clone() the shard"
                )
    return None


def _wrong_bytes(outcome: Attempt, numel: int) -> str | None:
    world_size = len(outcome.values)
    allowed = MICRO_BATCHES * 8 * numel * (world_size - 1) // world_size
    for rank in range(world_size):
        sent = outcome.bytes_sent(rank)
        right = f"the values are right, but rank {rank} sent {sent} bytes"
        if sent == 2 * allowed:
            return (
                f"{right} where a reduce-scatter sends {allowed}: the second half sent sums to ranks that "
                "do not keep them"
            )
        if sent != allowed:
            return f"{right} in {MICRO_BATCHES} micro-batches, where one reduce-scatter each sends {allowed}"
    return None
