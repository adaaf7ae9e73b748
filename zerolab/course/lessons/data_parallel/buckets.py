"""Lesson 03's first exercise: gradients averaged in buckets; messages and memory decide the target."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from zerolab.course.attempts import Attempt, attempt
from zerolab.course.evidence import Finding, examine, first_wrong, same, sum_of
from zerolab.course.exercise import graded
from zerolab.course.lessons.data_parallel.filled import SHAPES, SIZES, buckets, wrong_messages, wrong_order
from zerolab.course.lessons.data_parallel.solution import average_in_buckets
from zerolab.course.peak import Peak
from zerolab.course.targets import bronze, lowest, silver

# (ranks, bytes of a bucket): 800 is full to the last byte twice, and one gradient is larger
CASES = ((3, 800), (2, 1200), (4, 500), (2, 100_000), (2, 8), (1, 800))
HINTS = (
    "go through the gradients once. Keep a list of those that wait, and their bytes. If the next one does "
    "not fit, send what waits, and begin again with an empty list.",
    "after the loop a bucket is left that is not full: send it, too. Put the sending into a function of its "
    "own, which you call in both places.",
    "to send a bucket: flat = torch.cat of the flattened gradients, dist.all_reduce(flat), flat /= N in "
    "place, and copy_ the pieces of flat.split(sizes) back. For gold, keep no bucket for later.",
)
Brought = Sequence[torch.Tensor]  # by rank: all gradients, end to end


def only(sent: Sequence[int], g: Brought, r: int) -> torch.Tensor:
    """Return the gradients with the numbers `sent` averaged, and the others as rank r brought them."""
    pieces = zip((sum_of(g) / len(g)).split(SIZES), g[r].split(SIZES), strict=True)
    return torch.cat([mean if index in sent else own for index, (mean, own) in enumerate(pieces)])


UNCHANGED = "the gradients are what they were before: cat and flatten make copies, so copy the averages back"

# A sentence, and what it leads to: `g` holds the ranks' gradients, r is the rank, b the buckets.
# fmt: off
MISTAKES: dict[str, Callable[[Brought, int, list[list[int]], int], torch.Tensor]] = {
    "that is the sum over the ranks: divide by their number":
        lambda g, r, b, limit: sum_of(g),
    "each gradient was divided by the number of ranks, and nothing of the other ranks was added":
        lambda g, r, b, limit: g[r] / len(g),
    "divided by the number of ranks twice":
        lambda g, r, b, limit: sum_of(g) / len(g) ** 2,
    "every rank has rank 0's gradients: a broadcast copies, and an all-reduce adds":
        lambda g, r, b, limit: g[0],
    "the last bucket was never sent: after the loop one is left that is not full":
        lambda g, r, b, limit: only(range(b[-1][0]), g, r),
    "the gradient that did not fit was never sent: it is the first of the next bucket":
        lambda g, r, b, limit: only([*b[0], *(each for bucket in b[1:] for each in bucket[1:])], g, r),
    "only the first gradient was averaged":
        lambda g, r, b, limit: only([0], g, r),
    "only the first bucket was averaged":
        lambda g, r, b, limit: only(b[0], g, r),
    "only the last bucket was averaged":
        lambda g, r, b, limit: only(b[-1], g, r),
    "only the first gradient of each bucket was averaged":
        lambda g, r, b, limit: only([bucket[0] for bucket in b], g, r),
    "gradients that are larger than a bucket were left out: send each of them by itself":
        lambda g, r, b, limit: only([i for i, size in enumerate(SIZES) if 8 * size <= limit], g, r),
    "the average was added to the old gradient: put it in its place":
        lambda g, r, b, limit: sum_of(g) / len(g) + g[r],
    "the last bucket is the sum: divide it, too":
        lambda g, r, b, limit: torch.cat([
            total / (1 if index in b[-1] else len(g)) for index, total in enumerate(sum_of(g).split(SIZES))]),
    "the gradients were set to zero and stayed so: copy the average into them":
        lambda g, r, b, limit: torch.zeros_like(g[r]),
}
# fmt: on


class Averaged(NamedTuple):
    """What one rank's gradients are afterwards, and the bytes of tensors that it held beside them.

    `listed`, `answered`: other tensors that stand in the list afterwards, or that the function returned.
    """

    flat: torch.Tensor
    peak_bytes: int
    listed: torch.Tensor | None
    answered: torch.Tensor | None


@graded(
    "Gold: the mean is right on 1 to 4 ranks, every bucket is as full as it can be, and no more than two of "
    "them are in memory.",
    call="average_in_buckets(gradients, bucket_bytes)",
    hints=HINTS,
    solution=[average_in_buckets],
)
def check_buckets(fn: Callable) -> str | None:
    """Run fn(gradients, bucket_bytes) on 1 to 4 ranks: it leaves means in place. See targets.py."""
    reached = []

    def look(case: tuple[int, int]) -> Finding:
        finding, outcome = _look(fn, case)
        if not finding.stopped and not finding.wrong:
            if why := wrong_messages(outcome, case[1]):
                reached.append(bronze(why))
            elif why := wrong_order(outcome, case[1]) or _too_much_held(outcome, case[1]):
                reached.append(silver(why))
        return finding

    return examine(CASES, look) or lowest(reached)


def gradients_of(rank: int) -> list[torch.Tensor]:
    """Return what a rank brings: different for every rank and element."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def _average(fn: Callable, rank: int, bucket_bytes: int) -> Averaged:
    """In the worker: the gradients after fn has averaged them."""
    gradients = gradients_of(rank)
    listed = list(gradients)
    with Peak(gradients) as peak:
        answered = fn(listed, bucket_bytes)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    return Averaged(flat, peak.nbytes, _others(listed, gradients), _others(answered, gradients))


def _others(tensors: Any, gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensors end to end, if any of them is none of the gradients."""
    leaves = [leaf.detach() for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]
    own = {gradient.data_ptr() for gradient in gradients}
    if all(leaf.data_ptr() in own for leaf in leaves):
        return None
    return torch.cat([leaf.flatten() for leaf in leaves])


def _look(fn: Callable, case: tuple[int, int]) -> tuple[Finding, Attempt]:
    size, bucket_bytes = case
    outcome = attempt(_average, [(fn, rank, bucket_bytes) for rank in range(size)])
    where = f"{size} ranks and buckets of {bucket_bytes} bytes"
    if stopped := _stopped(outcome):
        return Finding(where, stopped), outcome
    brought = [torch.cat([gradient.flatten() for gradient in gradients_of(rank)]) for rank in range(size)]
    filled = buckets(bucket_bytes)
    unchanged = _in_other_tensors(outcome, sum_of(brought) / size) or UNCHANGED
    finding = Finding(
        where,
        None,
        [value.flat for value in outcome.values],
        [sum_of(brought) / size] * size,
        {
            why: [value(brought, rank, filled, bucket_bytes) for rank in range(size)]
            for why, value in MISTAKES.items()
        }
        | {unchanged: brought},
        lambda rank: [{f"rank {peer}'s gradient": each for peer, each in enumerate(brought)}],
        whole=sum_of(brought) / size,
        also=outcome.hint_of_calls,
    )
    if finding.wrong and not finding.fitting():
        finding = first_wrong((_of_gradient(finding, index) for index in range(len(SHAPES))), finding)
    return finding, outcome


def _in_other_tensors(outcome: Attempt, mean: torch.Tensor) -> str | None:
    """Where the averages are, if they are not in the gradients: in the list that was given, or returned."""
    for place, of in (
        ("`gradients[i] = ...` puts another tensor into the list", lambda value: value.listed),
        ("your function returns other tensors", lambda value: value.answered),
    ):
        found = [of(value) for value in outcome.values]
        if all(each is not None for each in found):
            right = all(each.shape == mean.shape and same(each, mean) for each in found)
            which = "there the averages are right" if right else "what is there is not right either"
            return (
                f"the gradients are what they were before: {place}, and does not change the gradient itself "
                f"({which}). Write into it: gradient.copy_(average)"
            )
    return None


def _of_gradient(finding: Finding, index: int) -> Finding:
    own = lambda value: value.split(SIZES)[index]
    parts = lambda rank: [{name: own(part) for name, part in finding.parts(rank)[0].items()}]
    return finding.part(f"gradient {index} of {len(SHAPES)}", own, parts)


def _stopped(outcome: Attempt) -> str | None:
    if outcome.failure:
        return outcome.failure
    if len(outcome.calls) > 1 and not any(outcome.calls):
        return "not written yet: nothing was sent, so no rank can know the others' gradients"
    if outcome.engine:
        return "that uses zerolab's own ZeroOptimizer: use one dist.all_reduce for each bucket"
    return outcome.unsound


def _too_much_held(outcome: Attempt, bucket_bytes: int) -> str | None:
    largest = 8 * max(sum(SIZES[each] for each in bucket) for bucket in buckets(bucket_bytes))
    for rank, value in enumerate(outcome.values):
        if value.peak_bytes > 2 * largest + 64:
            return (
                f"with buckets of {bucket_bytes} bytes, rank {rank} holds {value.peak_bytes} bytes at once "
                f"beside the gradients, and two of its largest messages are {2 * largest}: divide in place, "
                "and keep no bucket, and no copy of the gradients, for later"
            )
    return None
