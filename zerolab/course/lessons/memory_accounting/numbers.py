"""Exercises that ask for a number: a function is called with every case, and compared with formulas."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from zerolab.course.attempts import Odd, attempt
from zerolab.course.lessons.memory_accounting.asked import Answer, Case, Raised, ask
from zerolab.course.lessons.memory_accounting.scales import overall, rounded

Answers = Mapping[Case, Answer]
Formula = Callable[..., float]
Reading = Callable[[Answers, Case], str | None]


@dataclass(frozen=True)
class Question:
    """What a function has to compute, and what wrong numbers tell.

    Attributes:
        cases: the arguments of the calls.
        right: the formula.
        mistakes: a sentence, and the formula that the mistake leads to.
        where: a case in words.
        unit: what the number counts.
        source: what the reader starts from, where zerolab's own function is not taken.
        forbidden: the modules that have it ready.
        allowed: the names of those of their functions that may be called.
        read: says what the answers are, given the first wrong case, where no mistake explains them all.
        read_last: the same where none explains the wrong ones either.
        units: a sentence, and the factor of a wrong unit, which can come with another mistake.
        also_right: a second value that a case may have, where rounding decides.
        edges: says what is wrong although each case alone is right.
    """

    cases: Sequence[Case]
    right: Formula
    mistakes: Mapping[str, Formula]
    where: Callable[[Case], str]
    unit: str
    source: str
    forbidden: Collection[str] = ("zerolab.memory", "zerolab.plan")
    allowed: Collection[str] = ()
    read: Reading = lambda answers, first: None
    read_last: Reading = lambda answers, first: None
    units: Mapping[str, float] = field(default_factory=dict)
    also_right: Formula | None = None
    edges: Callable[[Answers], str | None] = lambda answers: None


UNITS = {
    "that is GB: return bytes": 1e-9,
    "that is GiB: return bytes, and 1 GB is 1e9 of them": 2.0**-30,
    "that mixes GB and GiB: 1 GB is 1e9 bytes, 1 GiB is 2**30": 1e9 / 2**30,
    "that mixes GB and GiB the other way: 1 GB is 1e9 bytes, 1 GiB is 2**30": 2**30 / 1e9,
    "that is MB: return bytes": 1e-6,
    "that is MiB: return bytes": 2.0**-20,
    "that is bits: a 16-bit number has 2 bytes": 8,
}


def units_mistaken(right: Formula) -> dict[str, Formula]:
    """Another unit than bytes."""
    return {why: _scaled(right, factor) for why, factor in UNITS.items()}


def _scaled(formula: Formula, factor: float) -> Formula:
    return lambda *case: formula(*case) * factor


def mistake_in(fn: Callable, question: Question) -> str | None:
    """Call fn with every case in a process of its own, and name the mistake behind its numbers."""
    cases = {case: question.where(case) for case in question.cases}
    outcome = attempt(ask, [(fn, cases, question.forbidden, question.allowed)])
    if outcome.failure:
        return outcome.failure.replace("rank 0", "your function").replace(", not waiting", "")
    answers, used, printed = outcome.values[0]
    if all(isinstance(value, Odd) and value.kind == "NoneType" for value in answers.values()):
        return _nothing_returned(printed)
    if used:
        return f"that calls zerolab.{used}, which has the formula: write it yourself, from {question.source}"
    wrong = [case for case, value in answers.items() if not _right(question, case, value)]
    if not wrong:
        return question.edges(answers)
    raised = {case: answers[case] for case in wrong if isinstance(answers[case], Raised)}
    if raised:
        return _raised(question, answers, raised, [case for case in wrong if case not in raised])
    return f"{question.where(wrong[0])}: {_mistake(question, answers, wrong)}"


def _nothing_returned(printed: bool) -> str:
    if printed:
        return "your function prints something and returns None: return the number"
    return "not written yet, or without a return: the function returned None"


def _right(question: Question, case: Case, value: Answer) -> bool:
    if close(value, question.right(*case)):
        return True
    return question.also_right is not None and close(value, question.also_right(*case))


def close(got: Answer, want: float) -> bool:
    """Equal up to the bytes that integer division cuts off."""
    return isinstance(got, float) and abs(got - want) <= 1e-9 * abs(want) + min(4, 1e-3 * abs(want))


def _raised(question: Question, answers: Answers, raised: Answers, wrong: list[Case]) -> str:
    """What a function raised in some cases, and what the others tell of it."""
    first = next(iter(raised.values()))
    said = first.said if isinstance(first, Raised) else ""
    if len(raised) == len(answers):
        return said
    if not wrong and all(question.right(*case) == 0 for case in raised):
        return f"{said}. All other answers are right, and here 0 is right: return it, and do not raise"
    returned = {case: value for case, value in answers.items() if case not in raised}
    named = _named(question, returned, returned) if wrong else None
    return f"{question.where(wrong[0])}: {named}. In another case {said}" if named else said


def _mistake(question: Question, answers: Answers, wrong: list[Case]) -> str:
    """Return the formula behind all answers, or how the answers are made, or a formula for the wrong ones."""
    got, first = answers[wrong[0]], wrong[0]
    if isinstance(got, Odd):
        returned = "None" if got.kind == "NoneType" else " ".join(filter(None, got[:2]))
        return f"your function returned {returned}: return a number of {question.unit}"
    if not isinstance(got, float) or not math.isfinite(got):
        return f"your function returned {got}: look for a division by 0"
    right = {case: question.right(*case) for case in question.cases}
    found = numbers(answers)
    return (
        _named(question, answers, answers)
        or (_in_a_short_type(found, right, first) if found else None)
        or (rounded(found, right) if found and question.units else None)
        or _two_mistakes(question, answers)
        or question.read(answers, first)
        or _named(question, answers, wrong)
        or question.read_last(answers, first)
        or (overall(found, right, question.unit) if found else None)
        or f"{got:.6g} {question.unit}, and the formula gives {question.right(*first):.6g}"
    )


def _in_a_short_type(found: Mapping[Case, float], right: Mapping[Case, float], first: Case) -> str | None:
    """Whether all answers are right but for the rounding of float32."""
    if not all(math.isclose(got, right[case], rel_tol=1e-6) for case, got in found.items()):
        return None
    return (
        f"your function returned {found[first]:.12g}, and the formula gives {right[first]:.12g}. That is "
        "right up to the rounding of float32, torch's default type: compute with Python's numbers"
    )


def _named(question: Question, answers: Answers, cases: Collection[Case]) -> str | None:
    fitting = [why for why, formula in question.mistakes.items() if fits(formula, answers, cases)]
    return ", or else ".join(fitting) or None


def _two_mistakes(question: Question, answers: Answers) -> str | None:
    """A wrong unit of a wrong formula."""
    for unit, factor in question.units.items():
        for why, formula in question.mistakes.items():
            if fits(_scaled(formula, factor), answers, answers):
                return f"these are two mistakes. First, {unit}. Second, {why}"
    return None


def fits(formula: Formula, answers: Answers, cases: Collection[Case]) -> bool:
    try:
        return all(close(answers[case], formula(*case)) for case in cases)
    except ZeroDivisionError:
        return False


def numbers(answers: Answers) -> dict[Case, float] | None:
    """Return the answers, if all of them are numbers."""
    found = {case: value for case, value in answers.items() if isinstance(value, float)}
    return found if len(found) == len(answers) else None
