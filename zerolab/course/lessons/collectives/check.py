"""Lesson 02's exercise: a ring reduce-scatter, graded on values, on owners, on neighbours and on bytes."""

from collections.abc import Callable

import torch

from zerolab import ring
from zerolab.course.exercise import Attempt, attempt, graded

# Rank r brings PRIMES[i] * BASE**r as its element i, so a sum in this base shows who is in it and how often;
# and as no prime divides another, that an element was added to its like.
BASE = 1000
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31)
# (world_size, numel). Four ranks first, as on two many mistakes look alike; then a length with a remainder.
CASES = ((4, 8), (3, 11), (2, 8), (1, 5))


@graded(
    "Your reduce-scatter is right on 1, 2, 3 and 4 ranks: values, owners, remainder, neighbours, and "
    "(N-1)/N bytes."
)
def check_reduce_scatter(fn: Callable) -> str | None:
    """Run fn(tensor) on 1 to 4 ranks and print the mistake it makes, or that it makes none.

    fn returns this rank's chunk (`zerolab.ring.chunks`) of the sum over the ranks, sends only to the next
    rank, and sends (N-1)/N of the tensor.
    """
    for world_size, numel in CASES:
        outcome = attempt(fn, [(contribution(rank, numel),) for rank in range(world_size)])
        problem = (
            outcome.failure
            or _not_an_answer(outcome)
            or _shortcut(outcome)
            or _wrong_length(outcome, world_size, numel)
            or _wrong_value(outcome, world_size, numel)
            or _wrong_road(outcome, world_size, numel)
        )
        if problem:
            return f"{problem} (seen with {world_size} ranks and {numel} elements)"
    return None


def contribution(rank: int, numel: int) -> torch.Tensor:
    """What rank brings: exact in float64, and different for every element and every rank."""
    return torch.tensor(PRIMES[:numel], dtype=torch.float64) * BASE**rank


def _not_an_answer(outcome: Attempt) -> str | None:
    if outcome.silent:
        return "not written yet: nothing was sent and None was returned"
    for rank, value in enumerate(outcome.values):
        if not isinstance(value, torch.Tensor):
            return (
                f"rank {rank} returned {type(value).__name__}, not its chunk: end with `return "
                "tensor[chunks[rank]]`"
            )
    return None


def _shortcut(outcome: Attempt) -> str | None:
    if outcome.collectives:
        return f"that calls torch's own {outcome.collectives[0]}: build it from send and receive"
    return None


def _wrong_length(outcome: Attempt, world_size: int, numel: int) -> str | None:
    lengths = [value.numel() for value in outcome.values]
    expected = [piece.stop - piece.start for piece in ring.chunks(numel, world_size)]
    if lengths == expected:
        return None
    if all(length == numel for length in lengths):
        return "every rank returned the whole tensor: a rank keeps only its own chunk of the sum"
    if sum(lengths) < numel and numel % world_size:
        dropped = numel - sum(lengths)
        return (
            f"the remainder is dropped: {numel} elements on {world_size} ranks came back as "
            f"{' + '.join(map(str, lengths))}, so {dropped} of them would never be updated. Cut with "
            "ring.chunks"
        )
    return f"the chunks have lengths {lengths}, and ring.chunks({numel}, {world_size}) cuts {expected}"


def _wrong_value(outcome: Attempt, world_size: int, numel: int) -> str | None:
    total = sum(contribution(rank, numel) for rank in range(world_size))
    pieces = [total[piece] for piece in ring.chunks(numel, world_size)]
    for rank, (got, want) in enumerate(zip(outcome.values, pieces, strict=True)):
        if torch.equal(got, want):
            continue
        if torch.allclose(got * world_size, want, rtol=1e-12, atol=0.0):
            return (
                "that is the mean, and a reduce-scatter returns the sum: divide later, once, where a mean "
                "is wanted"
            )
        for owner, piece in enumerate(pieces):
            if torch.equal(got, piece):
                return (
                    f"the sums are right but rank {rank} ended with chunk {owner}: shift your indices by "
                    "one round"
                )
        rounds = len(outcome.messages[rank])
        if rounds < world_size - 1:
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
            f"rank {rank} added elements of one chunk to another: what it receives in a round must be the "
            "chunk that its neighbour sends in that round"
        )
    if repeated:
        return f"rank {repeated[0]} is counted {counts[repeated[0]]:g} times in rank {rank}'s chunk"
    if missing == [peer for peer in range(len(counts)) if peer != rank]:
        return (
            f"rank {rank} returned a chunk that nothing was added to: in the last of N-1 rounds every rank "
            "must receive its own chunk"
        )
    return (
        f"rank {missing[0]} is missing from rank {rank}'s chunk: pass on the partial sum, what arrived in "
        "the round before included"
    )


def _wrong_road(outcome: Attempt, world_size: int, numel: int) -> str | None:
    sizes = [piece.stop - piece.start for piece in ring.chunks(numel, world_size)]
    for rank, sent in enumerate(outcome.messages):
        # What arrives ends here, so a rank passes on every chunk but the one after which it stops: its own.
        allowed = (numel - sizes[rank]) * 8
        if any(message.numel >= numel for message in sent):
            return (
                f"the values are right, but rank {rank} sends the whole tensor each round: "
                f"{outcome.bytes_sent(rank)} bytes where a ring sends {allowed}. Send one chunk at a time"
            )
        if len(sent) > world_size - 1:
            return (
                f"the values are right, but rank {rank} sends {len(sent)} messages: one round too many: "
                f"{world_size} ranks need {world_size - 1}"
            )
        if outcome.bytes_sent(rank) > allowed:
            return (
                f"the values are right, but rank {rank} sends {outcome.bytes_sent(rank)} bytes, and a ring "
                f"sends {allowed}"
            )
        strangers = sorted({message.peer for message in sent} - {(rank + 1) % world_size})
        if strangers:
            return (
                f"values and bytes are right, but rank {rank} sends to rank {strangers[0]}: in a ring it "
                f"talks to rank {(rank + 1) % world_size} only, so that each cable carries one message at a "
                "time"
            )
    return None
