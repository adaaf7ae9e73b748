"""Lesson 02's exercise: a ring reduce-scatter, graded on values, on owners, on neighbours and on bytes."""

from collections.abc import Callable

import torch

from zerolab import ring
from zerolab.course.exercise import Attempt, attempt, graded, total

# Rank r brings PRIMES[i] * BASE**r as its element i, so the digits of a sum in this base show which ranks are
# in it and how often. No prime divides another, so they also show elements added at the wrong place.
BASE = 1000
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31)
# (world_size, numel). Four ranks first, as many mistakes look alike on two; then a length with a remainder.
CASES = ((4, 8), (3, 11), (2, 8), (1, 5))


@graded(
    "Your reduce-scatter is right on 1 to 4 ranks: values, owners, remainder, neighbours, and (N-1)/N bytes."
)
def check_reduce_scatter(fn: Callable) -> str | None:
    """Run fn(tensor) on 1 to 4 ranks and print the mistake it makes, or that it makes none.

    fn returns this rank's chunk (`zerolab.ring.chunks`) of the sum over the ranks, sends only to the next
    rank, and sends (N-1)/N of the tensor.
    """
    for world_size, numel in CASES:
        outcome = attempt(fn, [(contribution(rank, numel),) for rank in range(world_size)])
        pieces = ring.chunks(numel, world_size)
        problem = (
            outcome.unusable("send and receive")
            or _not_a_chunk(outcome)
            or _wrong_length(outcome, [piece.stop - piece.start for piece in pieces])
            or _wrong_value(outcome, pieces)
            or _wrong_messages(outcome, [piece.stop - piece.start for piece in pieces])
        )
        if problem:
            return f"{problem} (seen with {world_size} ranks and {numel} elements)"
    return None


def contribution(rank: int, numel: int) -> torch.Tensor:
    """What rank brings: exact in float64, and different for every element and every rank."""
    return torch.tensor(PRIMES[:numel], dtype=torch.float64) * BASE**rank


def _not_a_chunk(outcome: Attempt) -> str | None:
    for rank, value in enumerate(outcome.values):
        if not isinstance(value, torch.Tensor):
            what = f"rank {rank} returned {type(value).__name__}, not its chunk"
            return f"{what}: end with `return tensor[chunks[rank]]`"
    return None


def _wrong_length(outcome: Attempt, expected: list[int]) -> str | None:
    lengths, world_size, numel = [value.numel() for value in outcome.values], len(expected), sum(expected)
    if lengths == expected:
        return None
    if all(length == numel for length in lengths):
        return "every rank returned the whole tensor: a rank keeps only its own chunk of the sum"
    if (dropped := numel - sum(lengths)) > 0 and numel % world_size:
        return (
            f"the remainder is dropped: {numel} elements on {world_size} ranks came back as "
            f"{' + '.join(map(str, lengths))}, so {dropped} of them would never be updated. Use ring.chunks"
        )
    return f"the chunks have lengths {lengths}, and ring.chunks({numel}, {world_size}) cuts {expected}"


def _wrong_value(outcome: Attempt, pieces: list[slice]) -> str | None:
    world_size = len(pieces)
    summed = total(contribution(rank, pieces[-1].stop) for rank in range(world_size))
    sums = [summed[piece] for piece in pieces]
    for rank, (got, want) in enumerate(zip(outcome.values, sums, strict=True)):
        if torch.equal(got, want):
            continue
        if torch.allclose(got * world_size, want, rtol=1e-12, atol=0.0):
            return "that is the mean, and a reduce-scatter returns the sum: divide after it, once"
        for owner, chunk in enumerate(sums):
            if torch.equal(got, chunk):
                ended = f"the sums are right but rank {rank} ended with chunk {owner}"
                return f"{ended}: shift your indices by one round"
        if (rounds := len(outcome.messages[rank])) < world_size - 1:
            return f"rank {rank} made {rounds} rounds, and {world_size} ranks need {world_size - 1}"
        return _miscounted(rank, got, want)
    return None


def _miscounted(rank: int, got: torch.Tensor, want: torch.Tensor) -> str:
    """Read the digits of the sum: which ranks are missing from it, and which are in it twice."""
    element = int(torch.nonzero(got != want)[0])
    value, right = round(float(got[element])), round(float(want[element]))
    own = right % BASE  # what a single rank brings to this element, in units of its own digit
    counts = []
    while right:
        counts.append(value % BASE / own)
        value, right = value // BASE, right // BASE
    missing = [peer for peer, count in enumerate(counts) if count == 0]
    repeated = [peer for peer, count in enumerate(counts) if count > 1]
    if value or any(count != int(count) or count > len(counts) for count in counts):
        return (
            f"rank {rank} added elements of one chunk to another: in each round a rank must receive the "
            "chunk that its neighbour sends"
        )
    if repeated:
        return f"rank {repeated[0]} is counted {counts[repeated[0]]:g} times in rank {rank}'s chunk"
    if missing == [peer for peer in range(len(counts)) if peer != rank]:
        return (
            f"rank {rank} returned a chunk that nothing was added to: in the last of N-1 rounds every rank "
            "must receive its own chunk"
        )
    return (
        f"rank {missing[0]} is missing from rank {rank}'s chunk: pass on the partial sum, with what arrived "
        "in the round before"
    )


def _wrong_messages(outcome: Attempt, sizes: list[int]) -> str | None:
    world_size, numel = len(sizes), sum(sizes)
    for rank, sent in enumerate(outcome.messages):
        bytes_sent, allowed = outcome.bytes_sent(rank), (numel - sizes[rank]) * 8  # all chunks but its own
        right = f"the values are right, but rank {rank} sends"
        if any(message.numel >= numel for message in sent):
            return (
                f"{right} the whole tensor each round: {bytes_sent} bytes where a ring sends {allowed}. "
                "Send one chunk at a time"
            )
        if len(sent) > world_size - 1:
            return (
                f"{right} {len(sent)} messages, one round too many: {world_size} ranks need {world_size - 1}"
            )
        if bytes_sent > allowed:
            return f"{right} {bytes_sent} bytes, and a ring sends {allowed}"
        following = (rank + 1) % world_size
        if strangers := sorted({str(message.peer) for message in sent} - {str(following)}):
            return (
                f"{right} to rank {strangers[0]}: in a ring it talks to rank {following} only, so that each "
                "link carries one message at a time"
            )
    return None
