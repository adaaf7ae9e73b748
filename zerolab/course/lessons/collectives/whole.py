"""Lesson 02's second exercise: an all-reduce, with a target each for values, bytes and memory."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from zerolab import ring
from zerolab.course.attempts import Attempt, Odd, attempt, returned
from zerolab.course.contributions import by_messages
from zerolab.course.evidence import Finding, examine, first_wrong, sum_of
from zerolab.course.exercise import graded
from zerolab.course.lessons.collectives.check import contribution
from zerolab.course.lessons.collectives.rounds import explaining
from zerolab.course.lessons.collectives.solution import my_all_reduce
from zerolab.course.peak import Peak
from zerolab.course.targets import bronze, lowest, silver

# (world_size, numel), as in the first exercise
CASES = ((3, 999), (4, 1001), (2, 8), (4, 9), (4, 10), (3, 11), (1, 5))
HINTS = (
    "your reduce-scatter leaves each rank one complete chunk. Send these chunks around the ring, in N-1 more "
    "rounds in which what arrives replaces a chunk, and is not added to it.",
    "in round s of the second half rank r sends chunk r-s and receives chunk r-s-1. For gold it receives "
    "right into that slice of `tensor`.",
    "for gold the first half works in `tensor`, too: `piece += buffer` changes the slice, and `piece = piece "
    "+ buffer` makes another tensor. One buffer of a chunk is enough for all rounds.",
)
Brought = Sequence[torch.Tensor]
Cuts = Sequence[slice]


def by_chunk(cuts: Cuts, value: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Return a tensor whose chunk c is that chunk of value(c)."""
    return torch.cat([value(chunk)[cut] for chunk, cut in enumerate(cuts)])


def partial_sum(g: Brought, r: int, chunk: int) -> torch.Tensor:
    """What rank r holds of a chunk after a ring's reduce-scatter: the sum over the ranks chunk+1 to r."""
    return sum_of(g[(chunk + 1 + hop) % len(g)] for hop in range((r - chunk - 1) % len(g) + 1))


# A sentence, and what it leads to: `g` holds the ranks' tensors, r is the rank, `cuts` the chunks by rank.
# fmt: off
MISTAKES: dict[str, Callable[[Brought, int, Cuts], torch.Tensor]] = {
    "its own tensor is what it was, and nothing that arrived is in it. A clone, or `piece + buffer`, is "
    "another tensor: write into `tensor`, or return the tensor with the sums":
        lambda g, r, cuts: g[r],
    "that is the mean, and an all-reduce returns the sum":
        lambda g, r, cuts: sum_of(g) / len(g),
    "only its own chunk is complete, the others are as they were: complete chunks still have to go around":
        lambda g, r, cuts: by_chunk(cuts, lambda c: sum_of(g) if c == r else g[r]),
    "only its own chunk is complete, the others are zeros: complete chunks still have to go around":
        lambda g, r, cuts: by_chunk(cuts, lambda c: sum_of(g) if c == r else torch.zeros_like(g[r])),
    "the second half adds what arrives, and passes on what arrived: a complete chunk replaces the old one":
        lambda g, r, cuts: by_chunk(cuts, lambda c: sum_of(g) + (partial_sum(g, r, c) if c != r else 0)),
    "in the second half a rank sends its own chunk in every round: from the second on, pass on what arrived":
        lambda g, r, cuts: by_chunk(
            cuts, lambda c: sum_of(g) if c in (r, (r - 1) % len(g)) else partial_sum(g, r, c)),
    "what goes around is the growing sum, so that a tensor is counted again and again: pass on what arrived":
        lambda g, r, cuts: sum_of(math.comb(len(g) - 1, hop) * g[r - hop] for hop in range(len(g))),
    "every rank added its own tensor once more":
        lambda g, r, cuts: sum_of(g) + g[r],
    "its own numbers are missing from the sum":
        lambda g, r, cuts: sum_of(g) - g[r],
    "only the left neighbour's tensor was added":
        lambda g, r, cuts: g[r] + g[r - 1],
    "only the right neighbour's tensor was added":
        lambda g, r, cuts: g[r] + g[(r + 1) % len(g)],
    "each rank has the sum up to itself: the total has to travel back":
        lambda g, r, cuts: sum_of(g[: r + 1]),
    "it returned rank 0's tensor: that is a broadcast, and nothing was added":
        lambda g, r, cuts: g[0],
    "the last numel % N elements are what they were: numel // N loses the remainder. Cut with ring.chunks":
        lambda g, r, cuts: torch.cat([sum_of(g)[: (n := len(g[0]) // len(g) * len(g))], g[r][n:]]),
    "the sum was added up twice":
        lambda g, r, cuts: sum_of(g) * 2,
    "the sums are right, and the chunks are one place off: each belongs where ring.chunks cut it":
        lambda g, r, cuts: torch.cat([sum_of(g)[cuts[c - 1]] for c in range(len(cuts))]),
    "the sums are right, and the chunks are one place too far left: each belongs where ring.chunks cut it":
        lambda g, r, cuts: torch.cat([sum_of(g)[cuts[(c + 1) % len(cuts)]] for c in range(len(cuts))]),
    "the sums are right, and the chunks stand in the order in which they arrived, its own first: put each "
    "where ring.chunks cut it":
        lambda g, r, cuts: torch.cat([sum_of(g)[cuts[r - c]] for c in range(len(cuts))]),
    "the sums are right, and the chunks are in reverse order":
        lambda g, r, cuts: torch.cat([sum_of(g)[cut] for cut in reversed(cuts)]),
}
# fmt: on


class Reduced(NamedTuple):
    """What one rank ended with, and the bytes of tensors that it held at once beside the one it was given."""

    value: torch.Tensor | Odd
    untouched: bool
    peak_bytes: int


@graded(
    "Gold: the sum is right on 1 to 4 ranks, no rank sends more than 2(N-1)/N of the tensor, and none holds "
    "more than two chunks beside it.",
    call="my_all_reduce(tensor)",
    hints=HINTS,
    solution=[my_all_reduce],
)
def check_all_reduce(fn: Callable) -> str | None:
    """Run fn(tensor) on 1 to 4 ranks: the sum is returned or left in `tensor`. See targets.py."""
    reached = []

    def look(case: tuple[int, int]) -> Finding:
        finding, outcome = _look(fn, case)
        if not finding.stopped and not finding.wrong:
            if why := _too_much_sent(outcome, case):
                reached.append(bronze(why))
            elif why := _too_much_held(outcome, case):
                reached.append(silver(why))
        return finding

    return examine(CASES, look) or lowest(reached)


def _reduce(fn: Callable, rank: int, numel: int) -> Reduced:
    """In the worker: fn's value, or what it left in the tensor if it returned nothing."""
    tensor = contribution(rank, numel)
    with Peak([tensor]) as peak:
        value = fn(tensor)
    untouched = value is None and torch.equal(tensor, contribution(rank, numel))
    return Reduced(returned(tensor if value is None else value), untouched, peak.nbytes)


def _look(fn: Callable, case: tuple[int, int]) -> tuple[Finding, Attempt]:
    world_size, numel = case
    ranks, cuts = range(world_size), ring.chunks(numel, world_size)
    outcome = attempt(_reduce, [(fn, rank, numel) for rank in ranks])
    where = f"{world_size} ranks and {numel} elements"
    stub = world_size > 1 and not any(outcome.calls) and all(seen.untouched for seen in outcome.values)
    if stopped := outcome.failure or ("not written yet: nothing was sent" if stub else None):
        return Finding(where, stopped), outcome
    if stopped := outcome.unusable("send and receive"):
        return Finding(where, stopped), outcome
    brought = [contribution(rank, numel) for rank in ranks]
    seen = [each.value for each in outcome.values]
    mistakes = {why: [value(brought, rank, cuts) for rank in ranks] for why, value in MISTAKES.items()}
    finding = Finding(
        where,
        None,
        seen,
        [sum_of(brought)] * world_size,
        mistakes | explaining(seen, brought, cuts, len(outcome.messages[0])),
        lambda rank: [{f"rank {peer}'s tensor": each for peer, each in enumerate(brought)}],
        explain=partial(by_messages, outcome.calls),
        lengths={
            "it returned its own chunk only: that is a reduce-scatter. Every rank needs the whole sum": [
                cut.stop - cut.start for cut in cuts
            ],
            "the remainder is lost: cut with ring.chunks": [numel // world_size * world_size] * world_size,
        },
    )
    whole = all(not isinstance(value, Odd) and value.shape == (numel,) for value in finding.seen)
    if finding.wrong and whole and not finding.fitting():
        finding = first_wrong((_of_chunk(finding, chunk, cut) for chunk, cut in enumerate(cuts)), finding)
    return finding, outcome


def _of_chunk(finding: Finding, chunk: int, cut: slice) -> Finding:
    own = lambda value: value[cut]
    parts = lambda rank: [{name: own(part) for name, part in finding.parts(rank)[0].items()}]
    return finding.part(f"chunk {chunk}", own, parts)


def _too_much_sent(outcome: Attempt, case: tuple[int, int]) -> str | None:
    world_size, numel = case
    allowed = 2 * (world_size - 1) * _longest(case) * 8
    for rank in range(world_size):
        sent = outcome.bytes_sent(rank)
        if sent > allowed:
            return (
                f"with {world_size} ranks, rank {rank} sends {sent} bytes, {sent / numel / 8:.3g} times the "
                f"tensor, and 2(N-1)/N times, {allowed} bytes, is enough: {_why_more(outcome, rank, case)}"
            )
    return None


def _why_more(outcome: Attempt, rank: int, case: tuple[int, int]) -> str:
    """Return what a rank's messages tell: whole tensors, or chunks in too many rounds."""
    messages, rounds = outcome.messages[rank], 2 * (case[0] - 1)
    whole = sum(message.numel >= case[1] for message in messages)
    if whole:
        return f"{whole} of its {len(messages)} messages are the whole tensor. Send one chunk in each round"
    if len(messages) > rounds:
        return (
            f"it sends {len(messages)} messages of a chunk or so, and N-1 rounds in each half are {rounds}. "
            "A half has too many rounds"
        )
    return "send one chunk in each round"


def _too_much_held(outcome: Attempt, case: tuple[int, int]) -> str | None:
    world_size, numel = case
    for rank, seen in enumerate(outcome.values):
        if world_size > 1 and seen.peak_bytes > 2 * _longest(case) * 8:
            full = seen.peak_bytes >= 8 * numel
            return (
                f"with {world_size} ranks, rank {rank} holds {seen.peak_bytes} bytes at once beside the "
                f"tensor of {8 * numel}, {'a second one of full size' if full else 'more than two chunks'}. "
                "Add into slices of the tensor, and receive into them or into one buffer"
            )
    return None


def _longest(case: tuple[int, int]) -> int:
    """Return the elements of the longest chunk."""
    world_size, numel = case
    return ring.chunks(numel, world_size)[0].stop
