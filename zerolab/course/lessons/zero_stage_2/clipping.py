"""Lesson 05's exercise on clipping: the norm of a gradient of which each rank holds a shard."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from zerolab.course.attempts import Attempt, Odd, attempt, returned
from zerolab.course.evidence import Finding, examine, same
from zerolab.course.exercise import graded
from zerolab.course.lessons.zero_stage_2 import norm_formulas
from zerolab.course.lessons.zero_stage_2.norms import (
    CASES,
    FACTORS,
    NORMS,
    SMALL,
    Case,
    Norms,
    of_elements,
    whole,
)
from zerolab.course.lessons.zero_stage_2.solution import clip_shard
from zerolab.course.messages import at
from zerolab.course.targets import bronze
from zerolab.course.wire import given

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
    shard = given(case.shards()[rank])
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
    if stopped := _stopped(outcome, case):
        return Finding(str(case), stopped)
    norms = [float(shard.norm()) for shard in case.shards()]
    of_norms = _of_norms(case, outcome, norms)
    return of_norms if of_norms.wrong else _of_shards(case, outcome, norms, of_norms)


def _stopped(outcome: Attempt, case: Case) -> str | None:
    """Return why there are no norms to compare."""
    if (outcome.failure or outcome.unsound) and (unequal := _shards_gathered(outcome, case)):
        return unequal
    if outcome.failure and "every rank must make the same calls" in outcome.failure:
        for rank, length in enumerate(case.lengths):
            if length == 0 and f"rank {rank} makes only" in outcome.failure:
                return f"{outcome.failure}. Its shard is empty here, and it has to make the call, too"
        return f"{outcome.failure}. Does a rank with a small norm skip the collective?"
    if outcome.failure:
        return outcome.failure
    for rank, each in enumerate(outcome.values):
        if isinstance(each.norm, Odd):
            if each.norm.kind == "NoneType" and not any(outcome.calls):
                return "not written yet: nothing was sent and None was returned"
            said = " ".join(filter(None, each.norm[:2])).replace("NoneType", "None")
            return f"rank {rank} returned {said}: return the norm, as a float or a tensor of one element"
    return outcome.unsound


def _shards_gathered(outcome: Attempt, case: Case) -> str | None:
    """Whether shards were gathered that differ in length, by the sizes of one collective on all ranks."""
    own = [[call for call in calls if call.collective] for calls in outcome.calls]
    for together in zip(*own, strict=False):
        sizes = [call.numel for call in together]
        of_shards = [[copies * length for length in case.lengths] for copies in (1, len(case.lengths))]
        if len(set(sizes)) > 1 and sizes in of_shards:
            lengths = " and ".join(f"{length}" for length in case.lengths)
            return (
                f"the shards differ in length here, {lengths} elements, and {together[0].call} needs tensors "
                "of one length. No rank needs the other shards: exchange the norms of the shards, or their "
                f"squares, one number of each rank{at(together[0].place)}"
            )
    return None


def _nothing_measured(outcome: Attempt) -> str | None:
    """Whether all ranks returned 0 without a message, as a function does that finds no gradient."""
    if any(outcome.calls) or any(isinstance(each.norm, Odd) or each.norm for each in outcome.values):
        return None
    return (
        "each rank returned 0, and nothing was sent. Does it call torch.nn.utils.clip_grad_norm_? That "
        "returns 0 where it finds no .grad, and a shard has none. Of a parameter whose .grad is the shard it "
        "would return the norm of this rank's own shard: the other shards belong to the gradient, too"
    )


def _of_norms(case: Case, outcome: Attempt, norms: Norms) -> Finding:
    """Return the norms that the ranks returned, beside those of the mistakes."""
    ranks, seen = range(len(norms)), [each.norm for each in outcome.values]
    named = NORMS | of_elements(case, norms)
    predicted = {why: [torch.tensor(float(norm(norms, r))) for r in ranks] for why, norm in named.items()}
    found = Finding(
        f"{case}, in the norm returned",
        None,
        seen,
        [torch.tensor(whole(norms)) for _ in ranks],
        predicted | {why: list(map(torch.tensor, of[case])) for why, of in norm_formulas.norms().items()},
        also=outcome.hint_of_calls,
        told=_shard_reduced(outcome) or _nothing_measured(outcome) or _near(seen, whole(norms)),
    )
    return _without_chance(found, predicted)


def _without_chance(found: Finding, named: Mapping[str, Sequence[torch.Tensor]]) -> Finding:
    """Of so many formulas some fit a single rank by chance: without a formula for all, use the `named`."""
    if found.wrong and not found.fitting(found.wrong):
        found.mistakes = named
    return found


def _shard_reduced(outcome: Attempt) -> str | None:
    """Whether a collective was called with the shard itself."""
    found = [call for own in outcome.calls for call in own if call.collective and call.given]
    if not found or "all_reduce" not in found[0].call:
        return None
    return (
        f"{found[0].call} adds up the shards themselves ({found[0].place}), and they are different parts of "
        "one gradient: add up the squares of their norms, in a tensor of one element"
    )


def _near(seen: list[torch.Tensor | Odd], want: float) -> str | None:
    """A single number that is a little off proves no rounding, unless a short type can hold it."""
    for rank, value in enumerate(seen):
        if isinstance(value, Odd) or not value.isfinite() or same(value, torch.tensor(want)):
            continue
        short = any(value.equal(value.to(dtype).float()) for dtype in (torch.bfloat16, torch.float16))
        if abs(float(value) - want) > 2e-2 * want or short:
            return None
        return f"rank {rank} returned {float(value):.5g}, and the norm is {want:.5g}"
    return None


def _of_shards(case: Case, outcome: Attempt, norms: Norms, of_norms: Finding) -> Finding:
    """Return the shards that are left, where the norms are right."""
    right, limit, shards = min(1.0, case.max_norm / whole(norms)), case.max_norm, case.shards()
    ranks, wants = range(len(shards)), [shard * right for shard in shards]
    scaled = lambda factor: [shards[r] * factor(norms, limit, r) for r in ranks]
    ways = FACTORS | norm_formulas.factors()
    mistakes = {f"the norm is right, and {why}": scaled(factor) for why, factor in ways.items()}
    if (told := _added_to_the_norm(outcome, shards, norms, limit)) is not None:
        why = f"the norm is right, and the factor is max_norm / (norm + {told:g}): add nothing so large to it"
        mistakes[why] = [shard * min(1.0, limit / (whole(norms) + told)) for shard in shards]
    mistakes["the norm is right, and each element is clamped to max_norm: multiply all by one factor"] = [
        shard.clamp(-limit, limit) for shard in shards
    ]
    mistakes[
        "the norm is right, and the shard's elements are squared: compute the squares in another tensor"
    ] = [shard.square() * right for shard in shards]
    # A wrong norm that is the right one in this case remains possible.
    mistakes |= {why: wants for why in of_norms.fitting() if why in of_norms.mistakes}
    found = Finding(
        f"{case}, in the shard",
        None,
        [each.shard for each in outcome.values],
        wants,
        mistakes,
        lambda rank: [{"this rank's shard": shards[rank]}],
        cost=_sent_too_much(outcome),
        told=_shard_reduced(outcome) or _factors_seen(outcome, shards, right),
    )
    if not found.wrong:
        found.where = str(case)  # of what a right answer costs, too
    return _without_chance(found, {})


def _factors_seen(outcome: Attempt, shards: list[torch.Tensor], right: float) -> str | None:
    """By what the ranks multiplied their shards, if they did and the factors differ."""
    factors = []
    for each, shard in zip(outcome.values, shards, strict=True):
        if isinstance(each.shard, Odd) or each.shard.shape != shard.shape or not len(shard):
            return None
        factor = float(each.shard @ shard) / (float(shard @ shard) or 1.0)
        if not same(each.shard, shard * factor):
            return None
        factors.append(f"{factor:.4g}")
    if len(set(factors)) == 1:
        return None
    seen = ", ".join(factors)
    return f"the norm is right, and by rank the shards are multiplied by {seen}: on every rank by {right:.4g}"


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
    """More than a number for each rank."""
    size = len(outcome.values)
    for rank, own in enumerate(outcome.messages):
        sent = outcome.bytes_sent(rank)
        if sent > SMALL * size:
            call = max(own, key=lambda message: message.nbytes).call
            return bronze(
                f"rank {rank} moves {sent} bytes with {call}, and one number is enough, the square of the "
                "norm of its shard"
            )
    return None
