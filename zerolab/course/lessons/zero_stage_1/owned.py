"""Lesson 04's exercise on shards: which slice of each parameter a rank owns."""

from collections.abc import Callable, Mapping
from typing import Any

from zerolab.course.attempts import Odd, attempt, told
from zerolab.course.exercise import graded
from zerolab.course.lessons.zero_stage_1 import ends, layouts
from zerolab.course.lessons.zero_stage_1.cuts import CASES, MISTAKES, Case, inside, plain
from zerolab.course.lessons.zero_stage_1.owners import beyond, described, never_cut, nothing_inside
from zerolab.course.lessons.zero_stage_1.pairs import NONE, pairs_of
from zerolab.course.lessons.zero_stage_1.solution import owned_slices
from zerolab.course.names import asks_the_job

HINTS = (
    "a shard has ceil(numel / world_size) elements of the padded buffer. Compute where yours begins and "
    "ends.",
    "a parameter begins in the buffer where the ones before it end. Subtract that offset from the ends of "
    "your shard to count from the parameter's own first element.",
    "cut both ends off at the parameter: start is max(first - offset, 0), and stop is min(last - offset, "
    "size). If stop is not above start, the slice is (0, 0).",
)


@graded(
    "Your slices are right for every rank: each element of each parameter has one owner.",
    call="owned_slices(sizes, world_size, rank)",
    hints=HINTS,
    solution=[owned_slices],
)
def check_owned(fn: Callable) -> str | None:
    """Ask fn(sizes, world_size, rank) for the slices of every rank of nine models; name what is wrong."""
    outcome = attempt(_answers, [(fn,)])
    if outcome.failure:
        return _stopped(outcome.failure)
    answers = dict(zip(CASES, outcome.values[0], strict=True))
    if all(answers[case] == tuple((stop, start) for start, stop in inside(case)) for case in CASES):
        return "that is (stop, start): return (start, stop)"
    answers = {case: own if isinstance(own, Odd) else tuple(plain(own)) for case, own in answers.items()}
    if set(answers.values()) == {Odd(NONE, "")}:
        return outcome.nothing_returned
    wrong = [case for case in CASES if answers[case] != tuple(inside(case))]
    if not wrong:
        return None
    asks = asks_the_job(fn, ((case[:-1], own) for case, own in answers.items()))
    return f"{asks or _mistake(answers, wrong)} (seen with {wrong[0]})"


def _answers(fn: Callable) -> list[tuple | Odd]:
    """In the worker: what fn returns for every case, each time as pairs of numbers."""
    return [_answer(fn, case) for case in CASES]


def _answer(fn: Callable, case: Case) -> tuple | Odd:
    try:
        value = fn(list(case.sizes), case.world_size, case.rank)
    except Exception as error:
        raise told(error, case) from None
    return pairs_of(value, case)


def _stopped(failure: str) -> str:
    failure = failure.replace("rank 0", "your function").replace(", not waiting", "")
    if "ZeroDivisionError" in failure:
        return f"{failure}. world_size is never 0, and rank is 0 on the first rank: divide by world_size"
    return failure


def _mistake(answers: Mapping[Case, Any], wrong: list[Case]) -> str:
    """Return the mistake behind all answers, or all wrong ones; or what is wrong with the first of these."""
    case, got = wrong[0], answers[wrong[0]]
    if isinstance(got, Odd):
        return "your function returned None, and for other ranks a list" if got.kind == NONE else got.kind
    if nothing := nothing_inside(answers, wrong):
        return nothing
    if named := _fitting(answers, CASES) or layouts.explained(answers):
        return ", or else ".join(named)
    if whole := never_cut(answers):
        return whole
    if named := ends.explained(answers) or _fitting(answers, wrong):
        return ", or else ".join(named)
    if len(got) != len(case.sizes):
        many = f"{len(got)} slice{'s' * (len(got) != 1)}"
        return f"your list has {many} for {len(case.sizes)} parameters: return one for each"
    return beyond(answers, case) or described(answers, case)


def _fitting(answers: Mapping[Case, Any], cases: list[Case]) -> list[str]:
    return [why for why, f in MISTAKES.items() if all(answers[c] == tuple(plain(f(c))) for c in cases)]
