"""Lesson 05's exercise: reduce a micro-batch's gradient, keep 1/N. Graded on values, memory and bytes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from itertools import pairwise
from typing import NamedTuple

import torch

from zerolab import ring
from zerolab.course.alive import Alive, first_name, kept_by, nbytes
from zerolab.course.attempts import Attempt, Odd, attempt, returned
from zerolab.course.evidence import Finding, examine, sum_of
from zerolab.course.exercise import graded
from zerolab.course.lessons.zero_stage_2.held import held_too_much
from zerolab.course.lessons.zero_stage_2.solution import reduce_and_keep

MICRO_BATCHES = 4
CASES = (3, 2, 4)  # ranks
SHARD = 96  # elements; a flat buffer is padded, so every shard is equal
Gradients = list[list[torch.Tensor]]  # by micro-batch and rank
Cut = Callable[[int], slice]  # a rank's chunk of the flat buffer
HINTS = (
    "ring.reduce_scatter(flat) leaves this rank's chunk of the sum. What does kept begin with, and what "
    "has to happen to it at the second micro-batch?",
    "return the chunk if kept is None, and kept + chunk otherwise. Never reduce kept: it is a sum over the "
    "ranks already.",
    "the chunk is a view of flat, and a view keeps the whole storage alive: .clone() it.",
)

# A sentence, and what it leads to after micro-batch m: g[m][r] are the gradients, `cut` is a chunk by rank.
# fmt: off
MISTAKES: dict[str, Callable[[Gradients, int, int, Cut], torch.Tensor]] = {
    "a rank holds the last micro-batch alone: the earlier ones were overwritten. Add the new shard to `kept`":
        lambda g, m, r, cut: sum_of(g[m])[cut(r)],
    "it holds its own gradient only, without those of the other ranks":
        lambda g, m, r, cut: own(g, m, r)[cut(r)],
    "it holds its own gradient of the last micro-batch only, without the other ranks' and without `kept`":
        lambda g, m, r, cut: g[m][r][cut(r)],
    "that is the mean over the ranks: keep the sum, and divide once, before the update":
        lambda g, m, r, cut: summed(g, m)[cut(r)] / len(g[0]),
    "that is the mean over the micro-batches: keep the sum, and divide once, before the update":
        lambda g, m, r, cut: summed(g, m)[cut(r)] / (m + 1),
    "that is the mean over ranks and micro-batches: keep the sum, and divide once, before the update":
        lambda g, m, r, cut: summed(g, m)[cut(r)] / (m + 1) / len(g[0]),
    "kept + shard is divided at every micro-batch, the earlier ones again and again: keep the sum":
        lambda g, m, r, cut: accumulated(g, m, cut(r), lambda kept, shard: (kept + shard) / len(g[0])),
    "the mean of `kept` and the new shard weighs the last micro-batch as much as all before it: add them":
        lambda g, m, r, cut: reduce(lambda a, b: (a + b) / 2, [sum_of(each)[cut(r)] for each in g[:m + 1]]),
    "the sums are right, but each rank keeps the next rank's shard instead of its own":
        lambda g, m, r, cut: summed(g, m)[cut(r + 1)],
    "the sums are right, but each rank keeps another rank's shard, the previous one's, instead of its own":
        lambda g, m, r, cut: summed(g, m)[cut(r - 1)],
    "the sums are right, but every rank keeps rank 0's shard: it is another rank's shard on all but rank 0":
        lambda g, m, r, cut: summed(g, m)[cut(0)],
    "every rank keeps the whole sum: that is stage 1's memory. Keep the shard that ring.reduce_scatter "
    "returns":
        lambda g, m, r, cut: summed(g, m),
    "every rank keeps its whole own gradient: that is stage 0's memory, and nothing was reduced":
        lambda g, m, r, cut: own(g, m, r),
    "`kept` was already a sum over the ranks, and it was reduced again. Reduce `flat` alone, then add":
        lambda g, m, r, cut: reduced_again(g, m, cut)[r],
    "`kept` was already a sum over the ranks, and it was multiplied by their number: reduce `flat` alone, "
    "then add":
        lambda g, m, r, cut: accumulated(g, m, cut(r), lambda kept, shard: len(g[0]) * kept + shard),
    "it is one micro-batch behind: it returned `kept` as it was, without the new shard":
        lambda g, m, r, cut: summed(g, max(0, m - 1))[cut(r)],
    "`kept` was added twice at every micro-batch":
        lambda g, m, r, cut: accumulated(g, m, cut(r), lambda kept, shard: 2 * kept + shard),
    "the first micro-batch counts twice: at first kept is None, and the shard alone is the sum":
        lambda g, m, r, cut: summed(g, m)[cut(r)] + sum_of(g[0])[cut(r)],
    "the largest of the micro-batches is kept, element by element: add them":
        lambda g, m, r, cut: reduce(torch.maximum, [sum_of(each)[cut(r)] for each in g[:m + 1]]),
    "only the first micro-batch is kept, and the later ones are lost":
        lambda g, m, r, cut: sum_of(g[0])[cut(r)],
}
# fmt: on


def summed(g: Gradients, micro: int) -> torch.Tensor:
    """The sum over the ranks and over the micro-batches up to `micro`."""
    return sum_of(sum_of(each) for each in g[: micro + 1])


def own(g: Gradients, micro: int, rank: int) -> torch.Tensor:
    """One rank's own gradients, summed over the micro-batches up to `micro`."""
    return sum_of(each[rank] for each in g[: micro + 1])


def accumulated(
    g: Gradients, micro: int, piece: slice, add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """What a rank keeps after `micro`, if `add` makes it of what the rank kept before and the new shard."""
    shards = [sum_of(each)[piece] for each in g[: micro + 1]]
    return reduce(add, shards, torch.zeros_like(shards[0]))


def reduced_again(g: Gradients, micro: int, cut: Cut) -> list[torch.Tensor]:
    """What the ranks keep after `micro`, if every micro-batch also sums over the ranks what they kept."""
    kept = [sum_of(g[0])[cut(rank)] for rank in range(len(g[0]))]
    for each in g[1 : micro + 1]:
        kept = [sum_of(each)[cut(rank)] + sum_of(kept) for rank in range(len(each))]
    return kept


class Kept(NamedTuple):
    """What fn returned for one micro-batch, the storage behind it, and what else of fn's is in memory."""

    value: torch.Tensor | Odd
    storage_bytes: int
    other_bytes: int
    other_name: str | None


@graded(
    "Gold: on 2, 3 and 4 ranks the sums are right after every micro-batch, 1/N of a gradient stays, each "
    "micro-batch sends (N-1)/N of one, and none is whole a second time. That is the core of stage 2.",
    call="reduce_and_keep(flat, kept)",
    hints=HINTS,
    solution=[reduce_and_keep],
)
def check_reduce_and_keep(fn: Callable) -> str | None:
    """Run fn(flat, kept) on 2 to 4 ranks, four micro-batches each, and print its mistake if it makes one.

    fn sums `flat` over the ranks, adds this rank's shard of the sum to `kept` (None at first), returns it,
    and keeps nothing else alive.
    """
    return examine(CASES, partial(_look, fn)) or held_too_much(fn)


def gradient(rank: int, micro: int, numel: int) -> torch.Tensor:
    """Different for every element, rank and micro-batch."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(10 * micro + rank), dtype=torch.float64)


def _step(fn: Callable, rank: int, numel: int) -> list[Kept]:
    """In the worker: the accumulation loop of one step, with fn after every backward pass."""
    kept, alive = None, Alive()
    seen: list[Kept] = []
    for micro in range(MICRO_BATCHES):
        kept = fn(gradient(rank, micro, numel), kept)
        is_tensor = isinstance(kept, torch.Tensor)
        others = alive.storages([kept, *(each.value for each in seen)])
        names = [kept_by(tensor, **{getattr(fn, "__name__", "fn"): fn}) for tensor in others.values()]
        other_bytes = nbytes(others)
        others.clear()  # the harness keeps nothing alive itself
        behind = kept.untyped_storage().nbytes() if is_tensor else 0
        seen.append(Kept(returned(kept), behind, other_bytes, first_name(names)))
    return seen


def _look(fn: Callable, world_size: int) -> Finding:
    where, numel = f"{world_size} ranks", world_size * SHARD
    outcome = attempt(_step, [(fn, rank, numel) for rank in range(world_size)])
    if stopped := _stopped(outcome):
        return Finding(where, stopped)
    g = [[gradient(rank, micro, numel) for rank in range(world_size)] for micro in range(MICRO_BATCHES)]
    findings = [_after(micro, outcome, g, where) for micro in range(MICRO_BATCHES)]
    wrong = [finding for finding in findings if finding.wrong]
    if not wrong:
        return replace(
            findings[-1], where=where, cost=_too_much_kept(outcome) or _wrong_bytes(outcome, numel)
        )
    named = set.intersection(*(set(finding.fitting()) for finding in findings))
    return replace(
        wrong[0], mistakes={why: wrong[0].mistakes[why] for why in wrong[0].mistakes if why in named}
    )


def _after(micro: int, outcome: Attempt, g: Gradients, where: str) -> Finding:
    """The ranks' shards after one micro-batch, beside what the mistakes would have made of them."""
    size = len(g[0])
    pieces = ring.chunks(g[0][0].numel(), size)
    cut = lambda rank: pieces[rank % size]
    parts = {
        f"rank {peer}'s micro-batch {each} at chunk {chunk}": g[each][peer][cut(chunk)]
        for each in range(micro + 1)
        for peer in range(size)
        for chunk in range(size)
    }
    return Finding(
        f"{where}, after micro-batch {micro}",
        None,
        [values[micro].value for values in outcome.values],
        [summed(g, micro)[cut(rank)] for rank in range(size)],
        {why: [value(g, micro, rank, cut) for rank in range(size)] for why, value in MISTAKES.items()},
        lambda rank: [{k: v for k, v in parts.items() if k.endswith(f"chunk {rank}")}, parts],
        whole=summed(g, micro),
        also=outcome.hint_of_calls or _wrong_bytes(outcome, g[0][0].numel(), "the bytes are wrong, too:"),
    )


def _stopped(outcome: Attempt) -> str | None:
    if outcome.failure:
        return outcome.failure
    kinds = {kept.value.kind for values in outcome.values for kept in values if isinstance(kept.value, Odd)}
    if not any(outcome.calls) and kinds == {"NoneType"}:
        return "not written yet: nothing was sent and None was returned"
    for name in outcome.collectives:
        sends = ", which sends every sum to every rank, twice the bytes" if "all_reduce" in name else ""
        return f"that calls torch's own {name}{sends}: use ring.reduce_scatter"
    return "that uses zerolab's own ZeroOptimizer: use ring.reduce_scatter" if outcome.engine else None


def _too_much_kept(outcome: Attempt) -> str | None:
    """A shard may be a view, which keeps the whole storage; and copies may be parked elsewhere."""
    shard_bytes = 8 * SHARD
    whole = shard_bytes * len(outcome.values)
    for rank, values in enumerate(outcome.values):
        right = f"the values are right, but rank {rank}"
        for each in values:
            if each.storage_bytes > shard_bytes:
                return (
                    f"{right} keeps {each.storage_bytes} bytes for a shard of {shard_bytes}: it returned a "
                    "view of the whole gradient. .clone() the shard"
                )
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


def _wrong_bytes(outcome: Attempt, numel: int, but: str = "the values are right, but") -> str | None:
    world_size = len(outcome.values)
    allowed = MICRO_BATCHES * 8 * numel * (world_size - 1) // world_size
    for rank in range(world_size):
        sent = outcome.bytes_sent(rank)
        right = f"{but} rank {rank} sent {sent} bytes"
        if sent == 2 * allowed:
            return (
                f"{right} where a reduce-scatter sends {allowed}: that is an all-reduce, whose second half "
                "sent sums to ranks that do not keep them"
            )
        if sent == allowed * world_size:
            return (
                f"{right} where a reduce-scatter sends {allowed}: it sends the whole gradient to every rank"
            )
        if sent != allowed:
            times = sent / allowed
            return (
                f"{right} in {MICRO_BATCHES} micro-batches, {times:.3g} times the {allowed} of one "
                "reduce-scatter each: send each chunk once"
            )
    return None
