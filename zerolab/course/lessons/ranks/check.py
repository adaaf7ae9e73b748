"""Lesson 00's exercise: average a gradient over the ranks with send and receive only."""

from collections.abc import Callable
from functools import partial, reduce
from math import comb

import torch

from zerolab.course.attempts import Odd, attempt, returned
from zerolab.course.contents import how_far, odd_contents
from zerolab.course.contributions import by_messages
from zerolab.course.evidence import Finding, examine, sum_of
from zerolab.course.exercise import graded
from zerolab.course.lessons.ranks.solution import average
from zerolab.course.wire import given

# Ranks and the gradient's type; three first, because many mistakes look alike on two.
CASES = ((3, torch.float64), (2, torch.float64), (4, torch.float64), (2, torch.float32))
NUMEL = 40
HINTS = (
    "let all ranks but 0 send their gradient to rank 0 and receive the mean from it. Rank 0 does the "
    "opposite.",
    "a receive needs a tensor to receive into: torch.empty_like(own). Rank 0 receives from 1, 2, … in a loop "
    "and adds to a copy of its own gradient.",
    "divide once, by dist.get_world_size(), on rank 0. Then send the quotient to every other rank, and "
    "return it on all of them.",
)

# A sentence, and what it leads to: `own` holds the ranks' gradients.
# fmt: off
MISTAKES: dict[str, Callable[[list[torch.Tensor], int], torch.Tensor]] = {
    "that is the sum, and the exercise asks for the mean: divide by world_size, once":
        lambda own, rank: sum_of(own),
    "the sum was divided by world_size twice: once is enough":
        lambda own, rank: sum_of(own) / len(own) ** 2,
    "the sum was divided by 2, whatever the number of ranks: use dist.get_world_size()":
        lambda own, rank: sum_of(own) / 2,
    "the sum was divided by 3, whatever the number of ranks: use dist.get_world_size()":
        lambda own, rank: sum_of(own) / 3,
    "the sum was divided by 4, whatever the number of ranks: use dist.get_world_size()":
        lambda own, rank: sum_of(own) / 4,
    "the sum was divided by N-1, the number of the other ranks: divide by N":
        lambda own, rank: sum_of(own) / max(1, len(own) - 1),
    "the sum was divided by N+1: divide by N":
        lambda own, rank: sum_of(own) / (len(own) + 1),
    "the sum was divided by the number of elements, not of ranks":
        lambda own, rank: sum_of(own) / NUMEL,
    "it returned its own gradient: nothing that arrived was used, so send the result back to all ranks "
    "and return what arrives":
        lambda own, rank: own[rank],
    "it returned its own gradient divided by N: nothing that arrived was added":
        lambda own, rank: own[rank] / len(own),
    "it returned rank 0's gradient, which was sent to all and not averaged":
        lambda own, rank: own[0],
    "it returned the last rank's gradient and not the mean: add each gradient that arrives to the sum":
        lambda own, rank: own[-1],
    "it returned its left neighbour's gradient":
        lambda own, rank: own[rank - 1],
    "it returned its right neighbour's gradient":
        lambda own, rank: own[(rank + 1) % len(own)],
    "it averaged its own gradient with one neighbour's only":
        lambda own, rank: (own[rank] + own[rank - 1]) / 2,
    "each rank has the sum up to itself: the total of all ranks has to reach every rank":
        lambda own, rank: sum_of(own[:rank + 1]),
    "each rank has the sum up to itself, divided: the total of all ranks has to reach every rank":
        lambda own, rank: sum_of(own[:rank + 1]) / len(own),
    "that is a mean of means, ((a+b)/2 + c)/2, which weighs the ranks differently: add all up, then "
    "divide once":
        lambda own, rank: reduce(lambda mean, other: (mean + other) / 2, own),
    "what goes around is the growing sum, so that a gradient is counted several times: pass on what arrived":
        lambda own, rank: sum_of(
            comb(len(own) - 1, hop) * own[rank - hop] / len(own) for hop in range(len(own))),
    "that is the largest of the ranks' elements, not their mean":
        lambda own, rank: reduce(torch.maximum, own),
    "that is the smallest of the ranks' elements, not their mean":
        lambda own, rank: reduce(torch.minimum, own),
    "that is the median of the ranks' elements, as torch.median gives it, and not their mean":
        lambda own, rank: torch.stack(own).median(dim=0).values,
    "that is the median of the ranks' elements, as torch.quantile gives it, and not their mean":
        lambda own, rank: torch.stack(own).quantile(0.5, dim=0),
    "that is the product of the gradients, not their mean":
        lambda own, rank: reduce(torch.mul, own),
    "that is the mean over the elements of one gradient: average over the ranks, element by element":
        lambda own, rank: own[rank].mean(),
}
# fmt: on


@graded(
    "Your average is right on 2, 3 and 4 ranks, and every rank has it.",
    call="average(own)",
    hints=HINTS,
    solution=[average],
)
def check_average(fn: Callable) -> str | None:
    """Run fn(gradient) on 3, 2 and 4 ranks: every rank must return the mean over the ranks."""
    return examine(CASES, partial(_look, fn))


def _look(fn: Callable, case: tuple[int, torch.dtype]) -> Finding:
    world_size, dtype = case
    own = [gradient(rank, dtype) for rank in range(world_size)]
    outcome = attempt(call_with, [(fn, rank, dtype) for rank in range(world_size)])
    return Finding(
        f"{world_size} ranks{', a gradient of float32' * (dtype is torch.float32)}",
        outcome.unusable("dist.send and dist.recv"),
        outcome.values,
        [sum_of(own) / world_size] * world_size,
        {why: [value(own, rank) for rank in range(world_size)] for why, value in MISTAKES.items()},
        lambda rank: [{f"rank {peer}'s gradient": each for peer, each in enumerate(own)}],
        also=odd_contents(outcome.calls, own),
        explain=partial(by_messages, outcome.calls),
        went=partial(how_far, outcome.calls, own),
    )


def gradient(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A rank's gradient: different for every rank and element."""
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank), dtype=dtype)


def call_with(fn: Callable, rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor | Odd:
    """In the worker: what fn makes of the rank's gradient."""
    return returned(fn(given(gradient(rank, dtype))))
