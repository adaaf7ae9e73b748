"""Lesson 02's second exercise: an all-reduce, with a target each for values, bytes and memory."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from zerolab.course.attempts import Attempt, Odd, attempt, returned
from zerolab.course.contributions import by_messages
from zerolab.course.evidence import Finding, examine, first_wrong, sum_of
from zerolab.course.exercise import graded
from zerolab.course.lessons.collectives.cases import CASES, Case
from zerolab.course.lessons.collectives.decoded import Traffic
from zerolab.course.lessons.collectives.rounds import explaining
from zerolab.course.lessons.collectives.second_half import why_incomplete
from zerolab.course.lessons.collectives.sent import of_longer_type, other_type
from zerolab.course.lessons.collectives.solution import my_all_reduce
from zerolab.course.let_go import handles_that_let_go
from zerolab.course.peak import Peak
from zerolab.course.targets import bronze, lowest, silver

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


def swapped(g: Brought, r: int) -> torch.Tensor:
    """What rank r has after each rank swapped sums with rank ^ 1, rank ^ 2, rank ^ 4, where there is one."""
    sums, distance = list(g), 1
    while distance < len(g):
        peers = [rank ^ distance for rank in range(len(g))]
        sums = [own + sums[peer] if peer < len(g) else own for own, peer in zip(sums, peers, strict=True)]
        distance *= 2
    return sums[r]


UNCHANGED = "its own tensor is what it was, and nothing that arrived is in it"

# A sentence, and what it leads to: `g` holds the ranks' tensors, r is the rank, `cuts` the chunks by rank.
# fmt: off
MISTAKES: dict[str, Callable[[Brought, int, Cuts], torch.Tensor]] = {
    UNCHANGED:
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
    "each rank swaps its sum with rank ^ distance, and that reaches all ranks only where their number is a "
    "power of two: of 3 ranks, rank 1 has no partner at distance 2":
        lambda g, r, cuts: swapped(g, r),
    "only the tensor of the rank before was added":
        lambda g, r, cuts: g[r] + g[r - 1],
    "only the next rank's tensor was added":
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
    """What one rank ended with, and the bytes of tensors that it held at once beside the one it was given.

    `silent`: it returned nothing, so what is in the tensor counts; `untouched`: and that is as it was.
    """

    value: torch.Tensor | Odd
    silent: bool
    untouched: bool
    peak_bytes: int


@graded(
    "Gold: the sum is right on 1 to 4 ranks, no rank sends more than 2(N-1) chunks, and none holds "
    "more than two chunks beside it.",
    call="my_all_reduce(tensor)",
    hints=HINTS,
    solution=[my_all_reduce],
)
def check_all_reduce(fn: Callable) -> str | None:
    """Run fn(tensor) on 1 to 4 ranks: the sum is returned or left in `tensor`. See targets.py."""
    reached = []

    def look(case: Case) -> Finding:
        finding, outcome = _look(fn, case)
        if not finding.stopped and not finding.wrong:
            if why := _too_much_sent(outcome, case):
                reached.append(bronze(why))
            elif why := _too_much_held(fn, outcome, case):
                reached.append(silver(why))
        return finding

    return examine(CASES, look) or lowest(reached)


def _reduce(fn: Callable, rank: int, case: Case) -> Reduced:
    """In the worker: fn's value, or what it left in the tensor if it returned nothing."""
    tensor = case.brought(rank)
    with Peak([tensor]) as peak:
        value = fn(tensor)
    silent = value is None
    untouched = silent and torch.equal(tensor, case.brought(rank))
    return Reduced(returned(tensor if silent else value), silent, untouched, peak.nbytes)


def _reduce_without_handles(fn: Callable, rank: int, case: Case) -> Reduced:
    """In the worker: the same, where a handle that was waited for keeps no tensor."""
    with handles_that_let_go():
        return _reduce(fn, rank, case)


def _look(fn: Callable, case: Case) -> tuple[Finding, Attempt]:
    ranks, cuts = range(case.world_size), case.cuts
    outcome = attempt(_reduce, [(fn, rank, case) for rank in ranks])
    stub = len(ranks) > 1 and not any(outcome.calls) and all(seen.untouched for seen in outcome.values)
    if stopped := outcome.failure or ("not written yet: nothing was sent" if stub else None):
        return Finding(str(case), stopped), outcome
    if stopped := outcome.unusable("send and receive"):
        return Finding(str(case), stopped), outcome
    brought, seen = [case.brought(rank) for rank in ranks], [each.value for each in outcome.values]
    right = sum_of(brought)
    mistakes = {why: [value(brought, rank, cuts) for rank in ranks] for why, value in MISTAKES.items()}
    of_rounds = explaining(seen, brought, cuts, outcome.messages)
    finding = Finding(
        str(case),
        None,
        seen,
        [right] * len(ranks),
        mistakes | of_rounds,
        lambda rank: [{f"rank {peer}'s tensor": each for peer, each in enumerate(brought)}],
        also=other_type(outcome, case),
        symptoms=[UNCHANGED],
        explain=partial(by_messages, outcome.calls),
        lengths={
            "it returned its own chunk only: that is a reduce-scatter. Every rank needs the whole sum": [
                cut.stop - cut.start for cut in cuts
            ],
            "the remainder is lost: cut with ring.chunks": [case.numel // len(ranks) * len(ranks)]
            * len(ranks),
        },
    )
    if finding.wrong:
        silent = [each.silent for each in outcome.values]
        finding.reason = why_incomplete(Traffic(outcome.calls, brought, cuts), seen, right, silent)
    whole = all(not isinstance(value, Odd) and value.shape == right.shape for value in finding.seen)
    if finding.wrong and whole and not finding.fitting(finding.wrong):
        finding = first_wrong((_of_chunk(finding, chunk, cut) for chunk, cut in enumerate(cuts)), finding)
    return finding, outcome


def _of_chunk(finding: Finding, chunk: int, cut: slice) -> Finding:
    """A chunk alone, which may be a sum of the ranks' chunks. The mistakes are those of whole tensors."""
    own = lambda value: value[cut]
    parts = lambda rank: [{name: own(part) for name, part in finding.parts(rank)[0].items()}]
    return replace(finding.part(f"chunk {chunk}", own, parts), mistakes={})


def _too_much_sent(outcome: Attempt, case: Case) -> str | None:
    allowed = 2 * (case.world_size - 1) * case.longest * case.dtype.itemsize
    for rank in range(case.world_size):
        sent = outcome.bytes_sent(rank)
        if sent > allowed:
            times = sent / case.numel / case.dtype.itemsize
            return (
                f"with {case.world_size} ranks, rank {rank} sends {sent} bytes, {times:.3g} times the tensor"
                f", and 2(N-1)/N times, {allowed} bytes, is enough: {_why_more(outcome, rank, case)}"
            )
    return None


def _why_more(outcome: Attempt, rank: int, case: Case) -> str:
    """Return what a rank's messages tell: a longer type, whole tensors, or chunks in too many rounds."""
    if longer := of_longer_type(outcome, case, rank):
        return longer
    messages, rounds = outcome.messages[rank], 2 * (case.world_size - 1)
    whole = sum(message.numel >= case.numel for message in messages)
    if whole:
        return f"{whole} of its {len(messages)} messages are the whole tensor. Send one chunk in each round"
    if len(messages) > rounds:
        return (
            f"it sends {len(messages)} messages of a chunk or so, and N-1 rounds in each half are {rounds}. "
            "A half has too many rounds"
        )
    return "send one chunk in each round"


def _too_much_held(fn: Callable, outcome: Attempt, case: Case) -> str | None:
    """Whether a rank holds more than two chunks. What a handle keeps after its wait does not count."""
    ranks, most = range(case.world_size), 2 * case.longest * case.dtype.itemsize
    if case.world_size == 1 or max(each.peak_bytes for each in outcome.values) <= most:
        return None
    outcome = attempt(_reduce_without_handles, [(fn, rank, case) for rank in ranks])
    for rank, seen in enumerate(outcome.values):
        if seen.peak_bytes > most:
            size = case.dtype.itemsize * case.numel
            full = "a second one of full size" if seen.peak_bytes >= size else "more than two chunks"
            return (
                f"with {case.world_size} ranks, rank {rank} holds {seen.peak_bytes} bytes at once beside the "
                f"tensor of {size}, {full}. Add into slices of the tensor, and receive into them or into one "
                "buffer"
            )
    return None
