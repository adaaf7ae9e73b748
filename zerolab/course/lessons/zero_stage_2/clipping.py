"""Lesson 05's exercise on clipping: the norm of a gradient of which each rank holds a shard."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from zerolab.course.attempts import Attempt, Odd, attempt, returned
from zerolab.course.evidence import Finding, examine
from zerolab.course.exercise import graded
from zerolab.course.lessons.zero_stage_2.norms import CASES, FACTORS, NORMS, Case, Norms, whole
from zerolab.course.lessons.zero_stage_2.solution import clip_shard
from zerolab.course.targets import bronze

HINTS = (
    "the norm of the whole gradient is the root of the sum of all squares. Which one number can a rank "
    "compute of its shard, so that the numbers of all ranks add up?",
    "all-reduce the square of your shard's norm, as a tensor of one element, and take the root afterwards. "
    "Every rank must call the collective, whether or not its own norm is large.",
    "then shard.mul_(max_norm / norm) if norm > max_norm, in place, with the norm of the whole gradient.",
)


class Clipped(NamedTuple):
    """What a rank returned as the norm, and its shard afterwards."""

    norm: torch.Tensor | Odd
    shard: torch.Tensor | Odd


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
    """Return a number as a tensor of no dimension; a float and a tensor of one element are numbers, too."""
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
    """Return why there are no norms to compare."""
    if outcome.failure and "every rank must make the same calls" in outcome.failure:
        return f"{outcome.failure}. Does a rank with a small norm skip the collective?"
    if outcome.failure:
        return outcome.failure
    for rank, each in enumerate(outcome.values):
        if isinstance(each.norm, Odd):
            if each.norm.kind == "NoneType" and not any(outcome.calls):
                return "not written yet: nothing was sent and None was returned"
            said = " ".join(filter(None, each.norm[:2])).replace("NoneType", "None")
            return f"rank {rank} returned {said}: return the norm, as a float or a tensor of one element"
    return None


def _of_norms(case: Case, outcome: Attempt, norms: Norms) -> Finding:
    """Return the norms that the ranks returned, beside those of the mistakes."""
    factor = min(1.0, case.max_norm / whole(norms))
    everything = torch.cat(case.shards())
    mistakes = NORMS | {
        "that is the largest element, the inf-norm: clipping takes the root of the sum of squares": (
            lambda norms, r: everything.abs().max()
        ),
        "that is the sum of the elements' sizes, the 1-norm: clipping takes the root of the sum of squares": (
            lambda norms, r: everything.abs().sum()
        ),
        "that is the sum of the elements: add their squares": lambda norms, r: everything.sum().abs(),
        "the squares are averaged over the elements of a shard: add them": (
            lambda norms, r: sum(shard.square().sum() / max(1, len(shard)) for shard in case.shards()) ** 0.5
        ),
        "that is the norm after the clipping: return the one before": lambda norms, r: factor * whole(norms),
        "that is the norm of this rank's own shard after the clipping: return that of the whole gradient "
        "before it": lambda norms, r: factor * norms[r],
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
    """Return the shards that are left, where the norms are right."""
    right, limit = min(1.0, case.max_norm / whole(norms)), case.max_norm
    ranks = range(len(shards))
    mistakes = {
        f"the norm is right, and {why}": [shards[r] * factor(norms, limit, r) for r in ranks]
        for why, factor in FACTORS.items()
    }
    if (told := _added_to_the_norm(outcome, shards, norms, limit)) is not None:
        why = f"the norm is right, and the factor is max_norm / (norm + {told:g}): add nothing so large to it"
        mistakes[why] = [shard * min(1.0, limit / (whole(norms) + told)) for shard in shards]
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


def _added_to_the_norm(
    outcome: Attempt, shards: list[torch.Tensor], norms: Norms, limit: float
) -> float | None:
    """What was added to the norm before max_norm was divided by it, if rank 0's factor tells."""
    left = outcome.values[0].shard
    if isinstance(left, Odd) or left.shape != shards[0].shape or not norms[0] or not left.norm():
        return None
    factor = float(left.double().norm()) / norms[0]
    return round(limit / factor - whole(norms), 3)


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
