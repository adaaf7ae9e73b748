"""Lesson 03's first exercise: gradients averaged in buckets; messages and memory decide the target."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from zerolab.course.attempts import Attempt, attempt
from zerolab.course.evidence import Finding, examine, first_wrong, same, sum_of
from zerolab.course.exercise import graded
from zerolab.course.lessons.data_parallel.averages import UNCHANGED, mistakes, which
from zerolab.course.lessons.data_parallel.filled import CASES, Case
from zerolab.course.lessons.data_parallel.held import Settled, allowed, held_too_much
from zerolab.course.lessons.data_parallel.messages import wrong_messages, wrong_order
from zerolab.course.lessons.data_parallel.solution import average_in_buckets
from zerolab.course.targets import bronze, silver

HINTS = (
    "go through the gradients once. Keep a list of those that wait, and their bytes. If the next one does "
    "not fit, send what waits, and begin again with an empty list.",
    "after the loop a bucket is left that is not full: send it, too. Put the sending into a function of its "
    "own, which you call in both places.",
    "to send a bucket: flat = torch.cat of the flattened gradients, dist.all_reduce(flat), flat /= N in "
    "place, and copy_ the pieces of flat.split(sizes) back. For gold, keep no bucket for later.",
)


class Averaged(NamedTuple):
    """What one rank's gradients are afterwards, and the bytes of tensors that it held beside them.

    `listed`, `answered`: other tensors that stand in the list afterwards, or that the function returned.
    """

    flat: torch.Tensor
    peak_bytes: int
    listed: torch.Tensor | None
    answered: torch.Tensor | None


@graded(
    "Gold: the mean is right on 1 to 4 ranks, every bucket is as full as it can be, in the order of the "
    "list, and no more than two of them are in memory.",
    call="average_in_buckets(gradients, bucket_bytes)",
    hints=HINTS,
    solution=[average_in_buckets],
)
def check_buckets(fn: Callable) -> str | None:
    """Run fn(gradients, bucket_bytes) on 1 to 4 ranks: it leaves means in place. See targets.py."""
    outcomes: dict[Case, Attempt] = {}

    def look(case: Case) -> Finding:
        outcome = attempt(_average, [(fn, rank, case) for rank in range(case.ranks)])
        stopped = _stopped(outcome, case, begun=any(any(each.calls) for each in outcomes.values()))
        outcomes[case] = outcome
        return Finding(str(case), stopped) if stopped else _compared(outcome, case)

    if wrong := examine(CASES, look):
        return wrong
    if why := wrong_messages(outcomes):
        return bronze(why)
    held = {case: [value.peak_bytes for value in outcome.values] for case, outcome in outcomes.items()}
    why = wrong_order(outcomes) or held_too_much(held, outcomes)
    return silver(why) if why else None


def gradients_of(rank: int, case: Case) -> list[torch.Tensor]:
    """Return what a rank brings: different for every rank and element."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator, dtype=case.dtype) for shape in case.shapes]


def _average(fn: Callable, rank: int, case: Case) -> Averaged:
    """In the worker: the gradients after fn has averaged them."""
    gradients = gradients_of(rank, case)
    listed = list(gradients)
    with Settled(gradients, allowed(case)) as peak:
        answered = fn(listed, case.bucket_bytes)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    return Averaged(flat, peak.nbytes, _others(listed, gradients), _others(answered, gradients))


def _others(tensors: Any, gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensors end to end, if any of them is none of the gradients."""
    leaves = [leaf.detach() for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]
    own = {gradient.data_ptr() for gradient in gradients}
    if all(leaf.data_ptr() in own for leaf in leaves):
        return None
    return torch.cat([leaf.flatten() for leaf in leaves])


def _compared(outcome: Attempt, case: Case) -> Finding:
    """Compare the gradients of all ranks with their means."""
    brought = [torch.cat([each.flatten() for each in gradients_of(rank, case)]) for rank in range(case.ranks)]
    mean = sum_of(brought) / case.ranks
    seen = [value.flat for value in outcome.values]
    finding = Finding(
        str(case),
        None,
        seen,
        [mean] * case.ranks,
        {**dict(mistakes(case, brought)), _in_other_tensors(outcome, mean) or UNCHANGED: brought},
        lambda rank: [{f"rank {peer}'s gradient": each for peer, each in enumerate(brought)}],
        whole=mean,
        also=outcome.hint_of_calls,
    )
    if not finding.wrong or finding.fitting():
        return finding
    if states := which(case, seen, brought):
        finding.mistakes, finding.told = {}, states
        return finding
    return first_wrong((_of_gradient(finding, case, index) for index in range(len(case.shapes))), finding)


def _in_other_tensors(outcome: Attempt, mean: torch.Tensor) -> str | None:
    """Where the averages are, if they are not in the gradients: in the list that was given, or returned."""
    for place, of in (
        ("`gradients[i] = ...` puts another tensor into the list", lambda value: value.listed),
        ("your function returns other tensors", lambda value: value.answered),
    ):
        found = [of(value) for value in outcome.values]
        if all(each is not None for each in found):
            right = all(each.shape == mean.shape and same(each, mean) for each in found)
            what = "there the averages are right" if right else "what is there is not right either"
            return (
                f"the gradients are what they were before: {place}, and does not change the gradient itself "
                f"({what}). Write into it: gradient.copy_(average)"
            )
    return None


def _of_gradient(finding: Finding, case: Case, index: int) -> Finding:
    """The same for one gradient, in its shape."""
    own = lambda value: value.split(case.sizes)[index].view(case.shapes[index])
    parts = lambda rank: [{name: own(part) for name, part in finding.parts(rank)[0].items()}]
    return finding.part(f"gradient {index} of {len(case.shapes)}", own, parts)


def _stopped(outcome: Attempt, case: Case, begun: bool) -> str | None:
    """A crash, a hang or a stub. `begun`: whether something was sent in an earlier case."""
    if outcome.failure:
        return outcome.failure + _empty_bucket(outcome, case)
    if len(outcome.calls) > 1 and not any(outcome.calls):
        nothing = "nothing was sent, so no rank can know the others' gradients"
        return f"{nothing}. Something was sent in other cases" if begun else f"not written yet: {nothing}"
    if outcome.engine:
        return "that uses zerolab's own ZeroOptimizer: use one dist.all_reduce for each bucket"
    return outcome.unsound


def _empty_bucket(outcome: Attempt, case: Case) -> str:
    """When a bucket was sent in which there was nothing."""
    if "non-empty list of Tensors" not in str(outcome.failure):
        return ""
    sent = [sum(call.nbytes for call in own) for own in outcome.calls]
    when = ""
    if max(sent, default=0) == 0 and case.nbytes[0] > case.bucket_bytes:
        when = " The first gradient is larger than a bucket here, and nothing waits before it."
    elif max(sent, default=0) >= sum(case.nbytes):
        when = " All gradients had been sent by then."
    return f". A bucket was sent that is empty.{when} Send only where something waits"
