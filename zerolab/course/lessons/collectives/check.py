"""Lesson 02's exercise: a ring reduce-scatter, graded on values, on owners, on neighbours and on bytes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from zerolab.course.attempts import Attempt, Odd, attempt, returned
from zerolab.course.contributions import by_messages
from zerolab.course.evidence import Finding, examine, sum_of
from zerolab.course.exercise import graded
from zerolab.course.lessons.collectives.cases import CASES, Case
from zerolab.course.lessons.collectives.decoded import Traffic
from zerolab.course.lessons.collectives.first_half import added_elsewhere, cause
from zerolab.course.lessons.collectives.held import held_too_much
from zerolab.course.lessons.collectives.rounds import of_first_half
from zerolab.course.lessons.collectives.sent import other_type, too_much_sent
from zerolab.course.lessons.collectives.solution import my_reduce_scatter
from zerolab.course.messages import Calls
from zerolab.course.wording import count

HINTS = (
    "rank r ends with chunk r, so it must receive chunk r in the last round, and chunk r-1 in the round "
    "before. Count backwards from there.",
    "for s in range(N-1): rank r sends chunk r-s-1 to the next rank and receives chunk r-s-2 from the one "
    "before, both numbers modulo N. There are N-1 rounds.",
    "receive into torch.empty_like(chunk), wait for both messages, and only then add the buffer to your own "
    "chunk: the next round sends this sum.",
)

UNCHANGED = (
    "it returned its own chunk with nothing added to it: in the last of N-1 rounds every rank must receive "
    "its own chunk, and add it to what it returns"
)

# A sentence, and what it leads to: `g` holds the ranks' tensors, r is the rank, `cut` its chunk by rank.
# fmt: off
MISTAKES: dict[str, Callable[[list[torch.Tensor], int, Callable[[int], slice]], torch.Tensor]] = {
    "that is the mean, and a reduce-scatter returns the sum: divide after it, once":
        lambda g, r, cut: sum_of(g)[cut(r)] / len(g),
    UNCHANGED:
        lambda g, r, cut: g[r][cut(r)],
    "only the numbers of the rank before were added: pass on the partial sum, with what arrived in the round "
    "before":
        lambda g, r, cut: g[r][cut(r)] + g[r - 1][cut(r)],
    "only the next rank's numbers were added: pass on the partial sum, with what arrived in the round "
    "before":
        lambda g, r, cut: g[r][cut(r)] + g[(r + 1) % len(g)][cut(r)],
    "its own chunk has the next rank's numbers and no others: add what arrives to the chunk in every round, "
    "instead of replacing the chunk":
        lambda g, r, cut: g[(r + 1) % len(g)][cut(r)],
    "its own chunk has the numbers of the rank before and no others: add what arrives to the chunk in every "
    "round, instead of replacing the chunk":
        lambda g, r, cut: g[r - 1][cut(r)],
    "its own numbers are missing from the sum: add what arrives to the chunk, instead of replacing the chunk":
        lambda g, r, cut: sum_of(g)[cut(r)] - g[r][cut(r)],
    "the sums are right, but each rank ended with the next rank's chunk: shift your indices by one round":
        lambda g, r, cut: sum_of(g)[cut(r + 1)],
    "the sums are right, but each rank ended with the previous rank's chunk: shift your indices by one round":
        lambda g, r, cut: sum_of(g)[cut(r - 1)],
    "each rank returned chunk 0 of the sum: return the chunk of its own rank":
        lambda g, r, cut: sum_of(g)[cut(0)],
    "the sums are right, and the chunks are in reverse order":
        lambda g, r, cut: sum_of(g)[cut(-1 - r)],
    "every rank returned the whole sum, which is an all-reduce: a rank keeps only its own chunk":
        lambda g, r, cut: sum_of(g),
    "every N-th element was taken: a chunk is a contiguous slice":
        lambda g, r, cut: sum_of(g)[r::len(g)],
    "the remainder is lost: numel // N elements for each rank leave out the last ones, which would never be "
    "updated. Cut with ring.chunks":
        lambda g, r, cut: sum_of(g)[r * (g[0].numel() // len(g)):][:g[0].numel() // len(g)],
    "that is torch.chunk's cut, which makes the last chunk shorter, and may make fewer chunks than ranks: "
    "cut with ring.chunks":
        lambda g, r, cut: [*sum_of(g).chunk(len(g)), *[sum_of(g)[:0]] * len(g)][r],
    "the last rank got the whole remainder: cut with ring.chunks, so that chunks differ by one at most":
        lambda g, r, cut: sum_of(g)[r * (n := g[0].numel() // len(g)):][:n if r + 1 < len(g) else None],
}
# fmt: on


@graded(
    "Gold: your reduce-scatter is right on 1 to 4 ranks: values, owners, remainder, neighbours, (N-1)/N "
    "bytes, and no more than two chunks beside the tensor.",
    call="my_reduce_scatter(tensor)",
    hints=HINTS,
    solution=[my_reduce_scatter],
)
def check_reduce_scatter(fn: Callable) -> str | None:
    """Run fn(tensor) on 1 to 4 ranks and print the mistake it makes, or that it makes none.

    fn returns this rank's chunk (`zerolab.ring.chunks`) of the sum over the ranks, sends only to one
    neighbour, the next rank or the one before, and sends (N-1)/N of the tensor.
    """
    return examine(CASES, partial(_look, fn)) or held_too_much(fn)


class Scattered(NamedTuple):
    """In the worker: what one rank returned, and what is in the tensor that it was given."""

    value: torch.Tensor | Odd
    left: torch.Tensor


def _call(fn: Callable, rank: int, case: Case) -> Scattered:
    tensor = case.brought(rank)
    value = returned(fn(tensor))
    return Scattered(value, tensor.clone())


def _look(fn: Callable, case: Case) -> Finding:
    ranks, cuts = range(case.world_size), case.cuts
    outcome = attempt(_call, [(fn, rank, case) for rank in ranks])
    stub = not any(outcome.calls) and all(each.value == Odd("NoneType", "") for each in outcome.values)
    if stub and not outcome.failure:
        return Finding(str(case), "not written yet: nothing was sent and None was returned")
    if stopped := outcome.unusable("send and receive"):
        return Finding(str(case), stopped + one_direction(outcome.calls) * bool(outcome.failure))
    brought, seen = [case.brought(rank) for rank in ranks], [each.value for each in outcome.values]
    mine = lambda rank: cuts[rank % case.world_size]
    everything = {
        f"rank {peer}'s chunk {chunk}": brought[peer][mine(chunk)] for chunk in ranks for peer in ranks
    }
    left = [each.left for each in outcome.values]
    of_rounds = of_first_half(seen, left, brought, cuts, outcome.messages)
    traffic = Traffic(outcome.calls, brought, cuts)
    finding = Finding(
        str(case),
        None,
        seen,
        [sum_of(brought)[cut] for cut in cuts],
        {why: [value(brought, rank, mine) for rank in ranks] for why, value in MISTAKES.items()} | of_rounds,
        lambda rank: [{k: v for k, v in everything.items() if k.endswith(f"chunk {rank}")}, everything],
        whole=sum_of(brought),
        lengths=_lengths(cuts),
        cost=too_much_sent(outcome, case),
        symptoms=[UNCHANGED],
        explain=partial(by_messages, outcome.calls),
    )
    if finding.wrong:
        finding.also = _too_few_rounds(outcome) or other_type(outcome, case)
        finding.reason = None if finding.also else _reason(traffic, seen, left)
    return finding


def _reason(traffic: Traffic, seen: Sequence[object], left: Sequence[torch.Tensor]) -> str | None:
    why = cause(traffic, left) or added_elsewhere(traffic, seen, left)
    n = len(traffic.calls)
    one_more = n > 2 and traffic.is_ring and all(len(own) == n for own in traffic.sent)
    more = f"each rank makes {n} rounds, and {n} ranks need {n - 1}" if one_more else None
    return ". ".join(filter(None, [why, more])) or None


def one_direction(calls: Calls) -> str:
    """What a ring asks for, if some ranks only send and others only receive."""
    more_than_once = lambda own, received: len(own) > 1 and all(call.received == received for call in own)
    if any(more_than_once(own, received) for own in calls for received in (True, False)):
        return ". In a ring each rank sends one chunk and receives one in every round"
    return ""


def _lengths(pieces: list[slice]) -> dict[str, list[int]]:
    """How long the ranks' values are if the tensor is cut in another way, or not at all."""
    numel, n = pieces[-1].stop, len(pieces)
    size = numel // n
    return {
        "every rank returned the whole tensor: a rank keeps only its own chunk of the sum": [numel] * n,
        f"the remainder is lost: {numel} elements on {n} ranks came back as {n} × {size}. Cut with "
        "ring.chunks": [size] * n,
        f"the tensor was padded to {n} × {size + 1} elements: cut the padding off, or cut with ring.chunks": [
            size + 1
        ]
        * n,
        "every rank returned one element or one sum: return the chunk": [1] * n,
    }


def _too_few_rounds(outcome: Attempt) -> str | None:
    world_size = len(outcome.calls)
    fewest = min((len(sent) for sent in outcome.messages), default=0)
    if fewest >= world_size - 1:
        return None
    return f"a rank made {count(fewest, 'round')}, and {world_size} ranks need {world_size - 1}"
