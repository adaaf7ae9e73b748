"""Lesson 05's exercise on clipping: the norm of a gradient of which each rank holds a shard."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from zerolab.course.attempts import Attempt, Odd, attempt, returned
from zerolab.course.evidence import Finding, examine
from zerolab.course.exercise import graded
from zerolab.course.lessons.zero_stage_2.solution import clip_shard
from zerolab.course.targets import bronze

HINTS = (
    "the norm of the whole gradient is the root of the sum of all squares. Which one number can a rank "
    "compute of its shard, so that the numbers of all ranks add up?",
    "all-reduce the square of your shard's norm, as a tensor of one element, and take the root afterwards. "
    "Every rank must call the collective, whether or not its own norm is large.",
    "then shard.mul_(max_norm / norm) if norm > max_norm, in place, with the norm of the whole gradient.",
)


class Case(NamedTuple):
    """The length of each rank's shard, and the largest norm that is allowed; `zeros`: rank 0's are all 0."""

    lengths: tuple[int, ...]
    max_norm: float
    zeros: bool = False

    def shards(self) -> list[torch.Tensor]:
        """Shards of very different norms: those of the last ranks are the largest."""
        made = [
            torch.randn(n, generator=torch.Generator().manual_seed(r)) * (r + 1)
            for r, n in enumerate(self.lengths)
        ]
        return [shard * (not self.zeros or rank > 0) for rank, shard in enumerate(made)]

    def __str__(self) -> str:
        zeros = ", rank 0's all zeros" if self.zeros else ""
        return f"{len(self.lengths)} ranks, max_norm {self.max_norm:g}{zeros}"


# Above max_norm on each rank; above it on some; above it together only; below it; nothing on a rank.
CASES = (
    Case((64, 64, 64), 2.0),
    Case((64, 64, 64, 64), 20.0),
    Case((64, 64), 16.0),
    Case((64, 64, 64), 500.0),
    Case((64, 64), 5.0, zeros=True),
    Case((64, 0), 5.0),
)
Norms = Sequence[float]  # of the shards, by rank


def whole(norms: Norms) -> float:
    """The norm of the whole gradient."""
    return math.hypot(*norms)


# What a rank may take for the norm: a sentence, and the number that it leads to.
# fmt: off
NORMS: dict[str, Callable[[Norms, int], float]] = {
    "that is the norm of this rank's own shard: the other shards belong to the gradient, too":
        lambda norms, r: norms[r],
    "that is the sum of the shards' norms: squares can be added, norms cannot":
        lambda norms, r: sum(norms),
    "that is the largest of the shards' norms: the norm of the whole is the root of the sum of squares":
        lambda norms, r: max(norms),
    "that is the mean of the shards' norms: the norm of the whole is the root of the sum of squares":
        lambda norms, r: sum(norms) / len(norms),
    "that is the sum of the squares: take its root":
        lambda norms, r: whole(norms) ** 2,
    "that is the root of the mean of the squares: do not divide by the number of ranks":
        lambda norms, r: whole(norms) / len(norms) ** 0.5,
    "that is the norm divided by the number of ranks: the sum of squares is not a mean":
        lambda norms, r: whole(norms) / len(norms),
    "that is the root of the sum of the norms: add their squares":
        lambda norms, r: sum(norms) ** 0.5,
    "that is the root of the number of ranks times this rank's own norm: were the squares added over the "
    "ranks?":
        lambda norms, r: len(norms) ** 0.5 * norms[r],
    "that is rank 0's norm on every rank: add the squares of all":
        lambda norms, r: norms[0],
    "that is the norm times the root of the number of ranks: were the squares added over the ranks twice?":
        lambda norms, r: whole(norms) * len(norms) ** 0.5,
}
# fmt: on


# What a rank may multiply its shard by: a sentence, and the factor.
# fmt: off
FACTORS: dict[str, Callable[[Norms, float, int], float]] = {
    "the shard is what it was: scale it in place, shard.mul_(factor)":
        lambda norms, limit, r: 1.0,
    "a gradient below max_norm is scaled up: scale only if the norm is larger":
        lambda norms, limit, r: limit / whole(norms),
    "each shard is scaled by its own norm, which changes the direction of the gradient":
        lambda norms, limit, r: min(1.0, limit / max(norms[r], 1e-9)),
    "only ranks whose own norm is too large scale: all scale by one factor":
        lambda norms, limit, r: min(1.0, limit / whole(norms)) if norms[r] > limit else 1.0,
    "the shard is divided by it: multiply by max_norm, too":
        lambda norms, limit, r: 1 / whole(norms) if whole(norms) > limit else 1.0,
    "the shard is divided by it whatever max_norm is":
        lambda norms, limit, r: 1 / whole(norms),
    "the shard is scaled twice":
        lambda norms, limit, r: min(1.0, limit / whole(norms)) ** 2,
    "the factor is upside down: it is max_norm / norm":
        lambda norms, limit, r: max(1.0, whole(norms) / limit),
    "large gradients stay as they are and small ones are scaled up: the factor is the smaller of 1 and "
    "max_norm / norm, not the larger":
        lambda norms, limit, r: max(1.0, limit / whole(norms)),
    "the factor is divided by the number of ranks, too":
        lambda norms, limit, r: limit / whole(norms) / len(norms) if whole(norms) > limit else 1.0,
    "each shard gets norm max_norm: the whole gradient has to":
        lambda norms, limit, r: limit / max(norms[r], 1e-9),
    "the shard is set to zeros":
        lambda norms, limit, r: 0.0,
}
# fmt: on


class Clipped(NamedTuple):
    """What a rank returned as the norm, and its shard afterwards."""

    norm: torch.Tensor | Odd
    shard: torch.Tensor


@graded(
    "Silver: the norm is that of the whole gradient on 2, 3 and 4 ranks, every shard is scaled by the same "
    "factor, and a rank sends a number, not its gradient.",
    call="clip_shard(shard, max_norm)",
    hints=HINTS,
    solution=[clip_shard],
)
def check_clip(fn: Callable) -> str | None:
    """Run fn(shard, max_norm) on 2 to 4 ranks: it scales `shard` in place and returns the norm before.

    Bronze for right norms and shards, silver if no rank sends more than a few numbers.
    """
    return examine(CASES, partial(_look, fn))


def _clip(fn: Callable, case: Case, rank: int) -> Clipped:
    """In the worker: the norm that fn returns, and what it leaves in the shard."""
    shard = case.shards()[rank]
    return Clipped(_number(fn(shard, case.max_norm)), returned(shard))


def _number(value: Any) -> torch.Tensor | Odd:
    """A number as a tensor of no dimension; a float and a tensor of one element are numbers, too."""
    one = isinstance(value, torch.Tensor) and value.numel() == 1
    if one or (isinstance(value, int | float) and not isinstance(value, bool)):
        return torch.tensor(float(value))
    if isinstance(value, torch.Tensor):
        return Odd("a tensor", f"of shape {tuple(value.shape)}")
    return cast(Odd, returned(value))


def _look(fn: Callable, case: Case) -> Finding:
    ranks = range(len(case.lengths))
    outcome = attempt(_clip, [(fn, case, rank) for rank in ranks])
    if stopped := _stopped(outcome):
        return Finding(str(case), stopped)
    shards = case.shards()
    norms = [float(shard.norm()) for shard in shards]
    of_norms = _of_norms(case, outcome, norms)
    return of_norms if of_norms.wrong else _of_shards(case, outcome, shards, norms)


def _stopped(outcome: Attempt) -> str | None:
    """Why there are no norms to compare."""
    if outcome.failure and "every rank must make the same calls" in outcome.failure:
        return f"{outcome.failure}. Does a rank with a small norm of its own leave the collective out?"
    if outcome.failure:
        return outcome.failure
    for rank, each in enumerate(outcome.values):
        if isinstance(each.norm, Odd):
            if each.norm.kind == "NoneType" and not any(outcome.calls):
                return "not written yet: nothing was sent and None was returned"
            said = " ".join(filter(None, each.norm)).replace("NoneType", "None")
            return f"rank {rank} returned {said}: return the norm, as a float or a tensor of one element"
    return None


def _of_norms(case: Case, outcome: Attempt, norms: Norms) -> Finding:
    """The norms that the ranks returned, beside those of the mistakes."""
    factor = min(1.0, case.max_norm / whole(norms))
    mistakes = NORMS | {
        "that is the norm after the clipping: return the one before": lambda norms, r: factor * whole(norms),
        "that is the factor: return the norm": lambda norms, r: factor,
        "that is max_norm: return the norm of the gradient": lambda norms, r: case.max_norm,
    }
    ranks = range(len(norms))
    return Finding(
        f"{case}, in the norm returned",
        None,
        [each.norm for each in outcome.values],
        [torch.tensor(whole(norms)) for _ in ranks],
        {why: [torch.tensor(float(norm(norms, r))) for r in ranks] for why, norm in mistakes.items()},
        also=outcome.hint_of_calls,
    )


def _of_shards(case: Case, outcome: Attempt, shards: list[torch.Tensor], norms: Norms) -> Finding:
    """The shards that are left, where the norms are right."""
    right, limit = min(1.0, case.max_norm / whole(norms)), case.max_norm
    ranks = range(len(shards))
    mistakes = {
        f"the norm is right, and {why}": [shards[r] * factor(norms, limit, r) for r in ranks]
        for why, factor in FACTORS.items()
    }
    mistakes["the norm is right, and each element is clamped to max_norm: multiply all by one factor"] = [
        shard.clamp(-limit, limit) for shard in shards
    ]
    return Finding(
        f"{case}, in the shard",
        None,
        [each.shard for each in outcome.values],
        [shard * right for shard in shards],
        mistakes,
        lambda rank: [{"this rank's shard": shards[rank]}],
        cost=_sent_too_much(outcome),
    )


def _sent_too_much(outcome: Attempt) -> str | None:
    """More than two numbers of eight bytes for each rank."""
    size = len(outcome.values)
    for rank, own in enumerate(outcome.messages):
        sent = outcome.bytes_sent(rank)
        if sent > 2 * 8 * size:
            call = max(own, key=lambda message: message.nbytes).call
            return bronze(
                f"rank {rank} moves {sent} bytes with {call}, and one number is enough: the square of the "
                "norm of its shard"
            )
    return None
