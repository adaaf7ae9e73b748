"""Lesson 05's second exercise: reduce a micro-batch's gradient, keep 1/N. Graded on values, memory, bytes."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from zerolab.course.alive import Alive, first_name, kept_by, nbytes
from zerolab.course.attempts import Attempt, Odd, attempt, returned
from zerolab.course.evidence import Finding, examine
from zerolab.course.exercise import graded
from zerolab.course.lessons.zero_stage_2.held import held_too_much
from zerolab.course.lessons.zero_stage_2.kept_costs import Kept, too_much_kept, wrong_bytes
from zerolab.course.lessons.zero_stage_2.kept_readings import read
from zerolab.course.lessons.zero_stage_2.kept_sums import (
    EVEN,
    MICRO_BATCHES,
    MISTAKES,
    STEPS,
    UNEVEN,
    Case,
    Gradients,
    gradient,
    summed,
)
from zerolab.course.lessons.zero_stage_2.solution import reduce_and_keep

HINTS = (
    "ring.reduce_scatter(flat) leaves this rank's chunk of the sum. What does kept begin with, and what "
    "has to happen to it at the second micro-batch?",
    "return the chunk if kept is None, and kept + chunk otherwise. Never reduce kept: it is a sum over the "
    "ranks already.",
    "the chunk is a view of flat, and a view keeps the whole storage alive: .clone() it.",
)


@graded(
    "Gold: on 2, 3 and 4 ranks the sums are right after every micro-batch of two steps, 1/N of a gradient "
    "stays, each micro-batch sends (N-1)/N of one, and none is whole a second time. That is the core of "
    "stage 2.",
    call="reduce_and_keep(flat, kept)",
    hints=HINTS,
    solution=[reduce_and_keep],
)
def check_reduce_and_keep(fn: Callable) -> str | None:
    """Run fn(flat, kept) on 2 to 4 ranks, two steps of four micro-batches, and print its mistake.

    fn sums `flat` over the ranks, adds this rank's shard of the sum to `kept` (None at the start of a step),
    returns it, and keeps nothing else alive. The number of ranks does not divide every length of flat.
    """
    look = partial(_look, fn)
    return examine(EVEN, look) or examine(UNEVEN, look) or held_too_much(fn)


def _steps(fn: Callable, case: Case, rank: int) -> list[list[Kept]]:
    """In the worker: the accumulation loop of two steps, with fn after every backward pass."""
    kept, alive = None, Alive()
    seen: list[Kept] = []
    for number in range(STEPS * MICRO_BATCHES):
        kept = fn(gradient(rank, number, case.numel), kept if number % MICRO_BATCHES else None)
        is_tensor = isinstance(kept, torch.Tensor)
        others = alive.storages([kept, *(each.value for each in seen)])
        names = [kept_by(tensor, **{getattr(fn, "__name__", "fn"): fn}) for tensor in others.values()]
        other_bytes = nbytes(others)
        others.clear()  # the harness keeps nothing alive itself
        behind = kept.untyped_storage().nbytes() if is_tensor else 0
        seen.append(Kept(returned(kept), behind, other_bytes, first_name(names)))
    return [seen[start : start + MICRO_BATCHES] for start in range(0, len(seen), MICRO_BATCHES)]


def _look(fn: Callable, case: Case) -> Finding:
    outcome = attempt(_steps, [(fn, case, rank) for rank in range(case.world_size)])
    if stopped := _stopped(outcome, case):
        return Finding(str(case), stopped)
    for step in range(STEPS):
        findings = _of_step(case, outcome, step)
        wrong = [finding for finding in findings if finding.wrong]
        if wrong:
            return _wrong(case, step, findings, wrong[0])
    cost = too_much_kept(case, outcome) or wrong_bytes(case, outcome)
    return Finding(str(case), cost=cost)


def _of_step(case: Case, outcome: Attempt, step: int) -> list[Finding]:
    """What the ranks kept after each micro-batch of a step."""
    gradients = case.gradients(step)
    return [
        _after(case, gradients, micro, [values[step][micro].value for values in outcome.values], outcome)
        for micro in range(MICRO_BATCHES)
    ]


def _after(case: Case, g: Gradients, micro: int, seen: list, outcome: Attempt) -> Finding:
    """The ranks' shards after one micro-batch, beside what the mistakes would have made of them."""
    ranks = range(case.world_size)
    parts = {
        f"rank {peer}'s micro-batch {each} at chunk {chunk}": g[each][peer][case.cut(chunk)]
        for each in range(micro + 1)
        for peer in ranks
        for chunk in ranks
    }
    return Finding(
        f"{case}, after micro-batch {micro}",
        None,
        seen,
        [summed(g, micro)[case.cut(rank)] for rank in ranks],
        {why: [value(g, micro, rank, case.cut) for rank in ranks] for why, value in MISTAKES.items()}
        if case.even
        else {},
        lambda rank: [{k: v for k, v in parts.items() if k.endswith(f"chunk {rank}")}, parts],
        whole=summed(g, micro),
        also=outcome.hint_of_calls or wrong_bytes(case, outcome, "the bytes are wrong, too:"),
    )


def _wrong(case: Case, step: int, findings: list[Finding], first: Finding) -> Finding:
    """The first wrong micro-batch, with those mistakes that explain the wrong ranks after every one."""
    if step:
        return replace(
            first,
            where=f"{case}, in a second step, {first.where.partition(', ')[2]}",
            mistakes={},
            also=None,
            told="the first step is right, and a second one is not: a step begins with kept=None, and your "
            "function may keep nothing from the step before it",
        )
    named = set.intersection(*(set(each.fitting(each.wrong)) for each in findings))
    first.mistakes = {why: values for why, values in first.mistakes.items() if why in named}
    first.told = read(case, findings, findings.index(first))
    return first


def _stopped(outcome: Attempt, case: Case) -> str | None:
    if outcome.failure:
        uneven = (
            f". {case.world_size} ranks do not divide {case.numel} elements: ring.chunks(numel, N) cuts any "
            "number, as ring.reduce_scatter does, and its parts differ by one"
        )
        added = _added_to_a_whole(outcome.failure, case)
        return f"{added}{outcome.failure}{uneven * (not case.even)}"
    values = [kept.value for of_rank in outcome.values for step in of_rank for kept in step]
    kinds = {value.kind for value in values if isinstance(value, Odd)}
    if not any(outcome.calls) and kinds == {"NoneType"}:
        return "not written yet: nothing was sent and None was returned"
    for name in outcome.collectives:
        sends = ", which sends every sum to every rank, twice the bytes" if "all_reduce" in name else ""
        return f"that calls torch's own {name}{sends}: use ring.reduce_scatter"
    if outcome.engine:
        return "that uses zerolab's own ZeroOptimizer: use ring.reduce_scatter"
    return outcome.unsound


def _added_to_a_whole(failure: str, case: Case) -> str:
    """Whether it stopped because a shard and a whole gradient differ in size, by torch's message."""
    sizes = re.search(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)", failure)
    shards = [case.length(rank) for rank in range(case.world_size)]
    if not sizes or not any({*map(int, sizes.groups())} == {shard, case.numel} for shard in shards):
        return ""
    return (
        f"`kept` is a shard of {min(map(int, sizes.groups()))} elements, and it is added to a whole gradient "
        f"of {case.numel}. Reduce flat first, and add the shard that comes back to `kept`. "
    )
