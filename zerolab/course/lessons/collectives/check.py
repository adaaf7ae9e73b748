"""Lesson 02's exercise: a ring reduce-scatter, graded on values, on owners, on neighbours and on bytes."""

from collections.abc import Callable
from functools import partial

import torch

from zerolab import ring
from zerolab.course.attempts import Attempt, attempt, returned
from zerolab.course.contributions import by_messages
from zerolab.course.evidence import Finding, examine, sum_of
from zerolab.course.exercise import graded
from zerolab.course.lessons.collectives.held import held_too_much
from zerolab.course.lessons.collectives.rounds import of_first_half
from zerolab.course.lessons.collectives.solution import my_reduce_scatter

# (world_size, numel). The long ones tell most; where N does not divide, torch.chunk is not ring.chunks.
CASES = ((3, 999), (4, 1001), (2, 8), (4, 9), (4, 10), (3, 11), (1, 5))
HINTS = (
    "rank r ends with chunk r, so it must receive chunk r in the last round, and chunk r-1 in the round "
    "before. Count backwards from there.",
    "for s in range(N-1): rank r sends chunk r-s-1 to the right and receives chunk r-s-2 from the left, both "
    "modulo N. There are N-1 rounds.",
    "receive into torch.empty_like(chunk), wait for both messages, and only then add the buffer to your own "
    "chunk: the next round sends this sum.",
)

# A sentence, and what it leads to: `g` holds the ranks' tensors, r is the rank, `cut` its chunk by rank.
# fmt: off
MISTAKES: dict[str, Callable[[list[torch.Tensor], int, Callable[[int], slice]], torch.Tensor]] = {
    "that is the mean, and a reduce-scatter returns the sum: divide after it, once":
        lambda g, r, cut: sum_of(g)[cut(r)] / len(g),
    "it returned its own chunk with nothing added to it: in the last of N-1 rounds every rank must receive "
    "its own chunk, and add it to what it returns, after work.wait() has returned":
        lambda g, r, cut: g[r][cut(r)],
    "only the left neighbour's numbers were added: pass on the partial sum, with what arrived in the round "
    "before":
        lambda g, r, cut: g[r][cut(r)] + g[r - 1][cut(r)],
    "only the right neighbour's numbers were added: pass on the partial sum, with what arrived in the "
    "round before":
        lambda g, r, cut: g[r][cut(r)] + g[(r + 1) % len(g)][cut(r)],
    "it returned its own chunk as the right neighbour brought it: add what arrives to the chunk, instead of "
    "replacing the chunk":
        lambda g, r, cut: g[(r + 1) % len(g)][cut(r)],
    "it returned its own chunk as the left neighbour brought it: add what arrives to the chunk, instead of "
    "replacing the chunk":
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
    neighbour, and sends (N-1)/N of the tensor.
    """
    return examine(CASES, partial(_look, fn)) or held_too_much(fn)


def contribution(rank: int, numel: int) -> torch.Tensor:
    """What rank brings: different for every element and every rank."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _call(fn: Callable, rank: int, numel: int):
    return returned(fn(contribution(rank, numel)))


def _look(fn: Callable, case: tuple[int, int]) -> Finding:
    world_size, numel = case
    brought = [contribution(rank, numel) for rank in range(world_size)]
    pieces = ring.chunks(numel, world_size)
    outcome = attempt(_call, [(fn, rank, numel) for rank in range(world_size)])
    where = f"{world_size} ranks and {numel} elements"
    if stopped := outcome.unusable("send and receive"):
        return Finding(where, stopped)
    mine = lambda rank: pieces[rank % world_size]
    everything = {
        f"rank {peer}'s chunk {chunk}": brought[peer][mine(chunk)]
        for chunk in range(world_size)
        for peer in range(world_size)
    }
    return Finding(
        where,
        None,
        outcome.values,
        [sum_of(brought)[piece] for piece in pieces],
        {why: [value(brought, rank, mine) for rank in range(world_size)] for why, value in MISTAKES.items()}
        | of_first_half(outcome.values, brought, pieces),
        lambda rank: [{k: v for k, v in everything.items() if k.endswith(f"chunk {rank}")}, everything],
        whole=sum_of(brought),
        lengths=_lengths(pieces),
        cost=_too_much_sent(outcome, pieces),
        also=_too_few_rounds(outcome),
        explain=partial(by_messages, outcome.calls),
    )


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
    return f"a rank made {fewest} rounds, and {world_size} ranks need {world_size - 1}"


def _too_much_sent(outcome: Attempt, pieces: list[slice]) -> str | None:
    """Right values, but too many bytes, or messages to others than one neighbour."""
    world_size, numel = len(pieces), pieces[-1].stop
    peers = {
        (message.peer - rank) % world_size
        for rank, sent in enumerate(outcome.messages)
        for message in sent
        if message.peer is not None
    }
    for rank, sent in enumerate(outcome.messages):
        allowed = (numel - (pieces[rank].stop - pieces[rank].start)) * 8  # all chunks but its own
        right = f"the values are right, but rank {rank} sends"
        if any(message.numel >= numel for message in sent):
            return (
                f"{right} the whole tensor each round: {outcome.bytes_sent(rank)} bytes where a ring sends "
                f"{allowed}. Send one chunk at a time"
            )
        if outcome.bytes_sent(rank) > allowed + 8 * world_size:
            bytes_sent = outcome.bytes_sent(rank)
            return (
                f"{right} {bytes_sent} bytes, in {len(sent)} message{'s' * (len(sent) > 1)}. A ring sends "
                f"{allowed}: stop after N-1 rounds"
            )
    if len(peers) > 1:
        return (
            "the values are right, but a rank sends to several others: in a ring it talks to rank+1 only, "
            "so that each link carries one message at a time"
        )
    return None
