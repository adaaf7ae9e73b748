"""Lesson 03's buckets: what common mistakes make of the averages, and which gradients are right."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby

import torch

from zerolab.course.evidence import same, sum_of
from zerolab.course.lessons.data_parallel.filled import Case, buckets

Brought = Sequence[torch.Tensor]  # by rank: all gradients, end to end
Value = Callable[[Brought, int, Case], torch.Tensor]
"""From what the ranks brought, a rank, and the case: what the rank ends with."""


def only(sent: Sequence[int], g: Brought, r: int, case: Case) -> torch.Tensor:
    """Return the gradients with the numbers `sent` averaged, and the others as rank r brought them."""
    pieces = zip((sum_of(g) / len(g)).split(case.sizes), g[r].split(case.sizes), strict=True)
    return torch.cat([mean if index in sent else own for index, (mean, own) in enumerate(pieces)])


def _dropped(case: Case) -> list[int]:
    """The gradients that are sent where each one that does not fit is lost when the bucket is sent."""
    sent, counted = [], 0
    for index, nbytes in enumerate(case.nbytes):
        if counted and counted + nbytes > case.bucket_bytes:
            counted = 0
        else:
            sent.append(index)
            counted += nbytes
    return sent


def _divided(g: Brought, case: Case, by: Callable[[list[int], int], float]) -> torch.Tensor:
    """The sums, each divided by what `by` makes of its bucket and of its own number."""
    bucket_of = {index: bucket for bucket in buckets(case) for index in bucket}
    sums = sum_of(g).split(case.sizes)
    return torch.cat([total / by(bucket_of[index], index) for index, total in enumerate(sums)])


def _begins(g: Brought, case: Case) -> torch.Tensor:
    """Each gradient has the first elements of its bucket's means."""
    means = (sum_of(g) / len(g)).split(case.sizes)
    found = []
    for bucket in buckets(case):
        flat = torch.cat([means[index] for index in bucket])
        found += [flat[: case.sizes[index]] for index in bucket]
    return torch.cat(found)


def _each(g: Brought, case: Case, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The means, each changed in the shape of its gradient."""
    pieces = zip((sum_of(g) / len(g)).split(case.sizes), case.shapes, strict=True)
    return torch.cat([change(piece.view(shape)).flatten() for piece, shape in pieces])


def _by_columns(mean: torch.Tensor) -> torch.Tensor:
    return mean.reshape(*reversed(mean.shape)).T if mean.dim() == 2 else mean


def _like_transposed(mean: torch.Tensor) -> torch.Tensor:
    return mean.T if mean.dim() == 2 else mean


UNCHANGED = "the gradients are what they were before: cat and flatten make copies, so copy the averages back"

# A sentence, and what it leads to.
# fmt: off
MISTAKES: dict[str, Value] = {
    "that is the sum over the ranks: divide by their number":
        lambda g, r, c: sum_of(g),
    "each gradient was divided by the number of ranks, and nothing of the other ranks was added":
        lambda g, r, c: g[r] / len(g),
    "divided by the number of ranks twice":
        lambda g, r, c: sum_of(g) / len(g) ** 2,
    "every rank has rank 0's gradients: a broadcast copies, and an all-reduce adds":
        lambda g, r, c: g[0],
    "the last bucket was never sent: after the loop one is left that is not full":
        lambda g, r, c: only(range(buckets(c)[-1][0]), g, r, c),
    "the gradient that did not fit was never sent: it is the first of the next bucket":
        lambda g, r, c: only(_dropped(c), g, r, c),
    "only the first gradient was averaged":
        lambda g, r, c: only([0], g, r, c),
    "only the first bucket was averaged":
        lambda g, r, c: only(buckets(c)[0], g, r, c),
    "only the last bucket was averaged":
        lambda g, r, c: only(buckets(c)[-1], g, r, c),
    "only the first gradient of each bucket was averaged":
        lambda g, r, c: only([bucket[0] for bucket in buckets(c)], g, r, c),
    "gradients that are larger than a bucket were left out: send each of them by itself":
        lambda g, r, c: only([i for i, nbytes in enumerate(c.nbytes) if nbytes <= c.bucket_bytes], g, r, c),
    "the average was added to the old gradient: put it in its place":
        lambda g, r, c: sum_of(g) / len(g) + g[r],
    "the last bucket is the sum: divide it, too":
        lambda g, r, c: _divided(g, c, lambda bucket, index: 1 if bucket == buckets(c)[-1] else len(g)),
    "the gradients were set to zero and stayed so: copy the average into them":
        lambda g, r, c: torch.zeros_like(g[r]),
    "each gradient has the first elements of its bucket: go on in the flat tensor by the size of each "
    "gradient":
        lambda g, r, c: _begins(g, c),
    "each gradient has one number in all its elements, the mean of its averages: average over the ranks, "
    "element by element":
        lambda g, r, c: _each(g, c, lambda mean: mean.mean().expand_as(mean)),
    "a gradient of two dimensions is filled column by column: use piece.view_as(gradient)":
        lambda g, r, c: _each(g, c, _by_columns),
    "a gradient of two dimensions stands in the flat tensor like its transposed: use gradient.flatten()":
        lambda g, r, c: _each(g, c, _like_transposed),
}
DIVISORS: Mapping[str, Callable[[Case, int, list[int], int], float]] = {  # case, rank, bucket, gradient
    "the number of ranks minus 1": lambda c, r, b, i: max(c.ranks - 1, 1),
    "the number of ranks plus 1": lambda c, r, b, i: c.ranks + 1,
    "2, whatever the number of ranks": lambda c, r, b, i: 2,
    "3, whatever the number of ranks": lambda c, r, b, i: 3,
    "4, whatever the number of ranks": lambda c, r, b, i: 4,
    "the number of gradients in the bucket": lambda c, r, b, i: len(b),
    "the number of gradients": lambda c, r, b, i: len(c.sizes),
    "the number of buckets": lambda c, r, b, i: len(buckets(c)),
    "the number of elements of the gradient": lambda c, r, b, i: c.sizes[i],
    "the number of elements in the bucket": lambda c, r, b, i: sum(c.sizes[each] for each in b),
    "the number of bytes in the bucket": lambda c, r, b, i: sum(c.nbytes[each] for each in b),
    "bucket_bytes": lambda c, r, b, i: c.bucket_bytes,
    "the rank plus 1": lambda c, r, b, i: r + 1,
}
# fmt: on


def mistakes(case: Case, brought: Brought) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Each sentence, with what all ranks end with."""
    for why, value in MISTAKES.items():
        yield why, [value(brought, rank, case) for rank in range(case.ranks)]
    for name, divisor in DIVISORS.items():
        values = [_divided(brought, case, partial(divisor, case, rank)) for rank in range(case.ranks)]
        yield f"the sum was divided by {name}: divide by the number of ranks", values
        yield (
            f"the sum was divided by {name} and by the number of ranks: divide by the number of ranks alone",
            [value / case.ranks for value in values],
        )


ADVICE = {
    "what they were before": "copy the averages back",
    "sums": "divide by the number of ranks",
    "zeros": "copy the averages into them",
    "rank 0's": "add up the gradients of all ranks",
}


def which(case: Case, seen: Sequence[torch.Tensor], brought: Brought) -> str | None:
    """Which gradients of which ranks are right, and what the others are, if that is known of all of them."""
    known = {
        "right": lambda rank: sum_of(brought) / len(brought),
        "what they were before": lambda rank: brought[rank],
        "sums": lambda rank: sum_of(brought),
        "zeros": lambda rank: torch.zeros_like(brought[rank]),
        "rank 0's": lambda rank: brought[0],
    }
    by_rank = []
    for rank, value in enumerate(seen):
        parts = {name: of(rank).split(case.sizes) for name, of in known.items()}
        states = [
            next((name for name in known if same(got, parts[name][index])), None)
            for index, got in enumerate(value.split(case.sizes))
        ]
        if None in states:
            return None
        by_rank.append([str(state) for state in states])
    said = "; ".join(_of_ranks(ranks, states, len(seen)) for ranks, states in _grouped(by_rank))
    advice = [ADVICE[name] for name in known if name in ADVICE and any(name in states for states in by_rank)]
    return f"{said}: {' and '.join(advice)}, for every gradient and on every rank"


def _grouped(by_rank: list[list[str]]) -> Iterator[tuple[list[int], list[str]]]:
    seen: list[list[str]] = []
    for states in by_rank:
        if states not in seen:
            seen.append(states)
            yield [rank for rank, each in enumerate(by_rank) if each == states], states


def _of_ranks(ranks: list[int], states: list[str], size: int) -> str:
    """The states of some ranks' gradients, in words."""
    runs = [
        (name, [index for index, _ in run]) for name, run in groupby(enumerate(states), lambda each: each[1])
    ]
    who = "on all ranks" if len(ranks) == size else f"on rank{'s' * (len(ranks) > 1)} {_and(ranks)}"
    if len(runs) == 1:
        return f"{who} all gradients are {states[0]}"
    said = [f"gradient{'s' * (len(own) > 1)} {_span(own)} {'are' if len(own) > 1 else 'is'} {name}"
            for name, own in runs]  # fmt: skip
    return f"{who} {', '.join(said)}"


def _span(own: list[int]) -> str:
    return str(own[0]) if len(own) == 1 else f"{own[0]} to {own[-1]}"


def _and(numbers: list[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last
