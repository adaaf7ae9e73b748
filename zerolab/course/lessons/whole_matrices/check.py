"""Lesson 10's exercise: give matrices to ranks so that no rank works longer than needed."""

from collections.abc import Callable, Mapping
from typing import Any

from zerolab.course.attempts import Odd, attempt
from zerolab.course.exercise import graded
from zerolab.course.lessons.whole_matrices.plans import CASES, MISTAKES, Case, Plan
from zerolab.course.lessons.whole_matrices.solution import owners

HINTS = (
    "keep a list of what each rank has to do so far. A matrix goes to the rank that has the least.",
    "the order matters. A long matrix that comes last finds every rank busy: which one should come first?",
    "sort the places of the matrices by their work, the longest first. Give each place to the rank with the "
    "least work, and add the work to it. Return the owners in the order of the list.",
)
Answers = Mapping[Case, Any]


@graded(
    "No rank works longer than needed: your busiest rank has no more to do than with the longest-first rule.",
    call="owners(work, world_size)",
    hints=HINTS,
    solution=[owners],
)
def check_owners(fn: Callable) -> str | None:
    """Ask fn(work, world_size) on two ranks for the owners of eleven lists of matrices; name the mistake.

    Right is every list of owners whose busiest rank has no more to do than with the longest-first rule.
    """
    outcome = attempt(_answers, [(fn,), (fn,)])
    if outcome.failure:
        return outcome.failure
    first, second = (dict(zip(CASES, answers, strict=True)) for answers in outcome.values)
    if set(map(str, first.values())) == {str(Odd("NoneType", ""))}:
        return "not written yet: the function returned None"
    wrong = [case for case in CASES if _odd(case, first[case]) or _too_long(case, first[case])]
    if wrong:
        return f"{_mistake(first, wrong)} (seen with {wrong[0]})"
    if differing := [case for case in CASES if first[case] != second[case]]:
        return (
            f"two ranks come to different owners (seen with {differing[0]}): every rank computes the list by "
            "itself, so use no random numbers, and no order that differs by process"
        )
    return None


def _answers(fn: Callable) -> list[Plan | Odd]:
    """In the worker: what fn returns for every case, as plain numbers."""
    return [_plan(fn(list(case.work), case.world_size)) for case in CASES]


def _plan(value: Any) -> Plan | Odd:
    """Take any sequence of whole numbers, a tensor too."""
    try:
        given = list(value)
        found = [int(each) for each in given]
        if found == given and not isinstance(value, set | dict | str):
            return found
    except (TypeError, ValueError):
        pass
    return Odd(type(value).__name__, "" if value is None else repr(value)[:60])


def _odd(case: Case, got: Plan | Odd) -> str | None:
    """What keeps an answer from being a list of owners."""
    if isinstance(got, Odd):
        said = f"{got.kind} {got.text}".replace("NoneType", "None").strip()
        return f"your function returned {said}: return a list with the number of a rank for each matrix"
    if len(got) != len(case.work):
        per_rank = ", one for each rank" if len(got) == case.world_size else ""
        return (
            f"your list has {len(got)} numbers{per_rank}, for {len(case.work)} matrices: return the owner of "
            "each matrix"
        )
    beyond = [owner for owner in got if not 0 <= owner < case.world_size]
    if beyond:
        return (
            f"a matrix goes to rank {beyond[0]}, and the ranks are 0 to {case.world_size - 1}: return the "
            "owner's number"
        )
    return None


def _too_long(case: Case, got: Plan) -> bool:
    best = case.loads(owners(list(case.work), case.world_size))
    return max(case.loads(got)) > max(best)


def _mistake(answers: Answers, wrong: list[Case]) -> str:
    """The mistake behind all answers, or what the busiest rank of one has to do."""
    case = wrong[0]
    if odd := _odd(case, answers[case]):
        return odd
    proper = [each for each in CASES if not _odd(each, answers[each])]
    for same in (_same_owners, _same_loads):
        fits = [why for why, plan in MISTAKES.items() if all(same(c, answers[c], plan(c)) for c in proper)]
        if fits:
            return ", or else ".join(fits)
    loads, best = case.loads(answers[case]), case.loads(owners(list(case.work), case.world_size))
    busiest, least = loads.index(max(loads)), loads.index(min(loads))
    return (
        f"rank {busiest} works longer than needed: it has {loads[busiest]:,} to do and rank {least} has "
        f"{loads[least]:,}, where {max(best):,} is possible for the busiest. Begin with the longest matrix, "
        "and give each to the rank that has the least work so far"
    )


def _same_owners(case: Case, got: Plan, other: Plan) -> bool:
    return got == other


def _same_loads(case: Case, got: Plan, other: Plan) -> bool:
    """Whether the ranks have as much to do, whichever of them has it."""
    return sorted(case.loads(got)) == sorted(case.loads(other))
