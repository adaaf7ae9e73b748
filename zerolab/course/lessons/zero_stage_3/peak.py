"""Lesson 06's exercise on the peak: how many parameters are whole at once, where blocks differ in size."""

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any

from zerolab.course.attempts import Odd, attempt, told
from zerolab.course.exercise import graded
from zerolab.course.lessons.zero_stage_3.formulas import FOUR_TIMES, TWICE, explaining
from zerolab.course.lessons.zero_stage_3.peak_sums import Case, as_a_sum
from zerolab.course.lessons.zero_stage_3.solution import most_whole

HINTS = (
    "while block i computes, root is whole, block i is whole, and the next `prefetch` blocks are whole or on "
    "their way.",
    "blocks[i : i + prefetch + 1] are these blocks. Near the end there are fewer.",
    "return root + the largest of sum(blocks[i : i + prefetch + 1]) over all i.",
)


CASES = [
    Case(root, blocks, prefetch)
    for root, blocks in (
        (100, (50, 10, 40, 70, 30)),
        (1000, (8, 1, 1, 9)),
        (7, (5, 5, 5)),
        (0, (90, 3, 2, 80)),
        (10, (2, 30, 4, 4, 60)),
        (3, (9, 1, 6, 6, 5)),
    )
    for prefetch in (1, 0, 2, 6)
]

# A sentence, and the number that the mistake leads to.
# fmt: off
MISTAKES: dict[str, Callable[[Case], float]] = {
    "root is missing: it stays whole from forward to backward":
        lambda c: c.right - c.root,
    "that is prefetch blocks: the block that computes is whole, too, which makes prefetch + 1":
        lambda c: c.root + (max(c.windows(c.prefetch)) if c.prefetch else 0),
    "that is one block too many: prefetch + 1 blocks are whole, the one that computes and the next ones":
        lambda c: c.root + max(c.windows(c.prefetch + 2)),
    "that is prefetch + 1 times the largest block: the blocks differ, so add up neighbours":
        lambda c: c.root + (c.prefetch + 1) * max(c.blocks),
    "that is the largest block as often as blocks are whole: the blocks differ, so add up neighbours":
        lambda c: c.root + min(c.prefetch + 1, len(c.blocks)) * max(c.blocks),
    "that is prefetch + 1 times the mean block: one large block decides the peak":
        lambda c: c.root + (c.prefetch + 1) * sum(c.blocks) / len(c.blocks),
    "that is the mean block as often as blocks are whole: one large block decides the peak":
        lambda c: c.root + min(c.prefetch + 1, len(c.blocks)) * sum(c.blocks) / len(c.blocks),
    "these are the largest prefetch + 1 blocks, wherever they stand: only blocks that follow each other are "
    "whole together":
        lambda c: c.root + c.largest(c.prefetch + 1),
    "these are the first prefetch + 1 blocks: take the largest sum over all blocks that compute":
        lambda c: c.root + c.windows(c.prefetch + 1)[0],
    "these are the last prefetch + 1 blocks: take the largest sum over all blocks that compute":
        lambda c: c.root + sum(c.blocks[-c.prefetch - 1:]),
    "that is the smallest sum of neighbours: the peak is the largest":
        lambda c: c.root + min(c.windows(c.prefetch + 1)),
    "that is the whole model, as at stage 2: only prefetch + 1 blocks are whole":
        lambda c: c.root + sum(c.blocks),
    "the root counts once for each block: it is whole once":
        lambda c: max(c.windows(c.prefetch + 1)) + c.root * min(c.prefetch + 1, len(c.blocks)),
    "root counts twice: it is whole once":
        lambda c: c.root + c.right,
    "that is the larger of root and the blocks: they are whole at the same time, so add them":
        lambda c: max(c.root, c.right - c.root),
    "that is prefetch times the largest block: prefetch + 1 blocks are whole, and they differ":
        lambda c: c.root + c.prefetch * max(c.blocks),
    "that is for prefetch=1, whatever prefetch is":
        lambda c: c.root + max(c.windows(2)),
    "prefetch goes both ways here, to the block before and to the next: only blocks that come are gathered":
        lambda c: c.root + max(sum(c.blocks[max(0, i - c.prefetch):i + c.prefetch + 1])
                               for i in range(len(c.blocks))),
    "after the last block that goes on with the first ones: near the end fewer blocks are left to gather":
        lambda c: c.root + max(sum(c.blocks[(i + k) % len(c.blocks)] for k in range(c.prefetch + 1))
                               for i in range(len(c.blocks))),
    f"that is {FOUR_TIMES}":
        lambda c: 4 * c.right,
    f"that is {TWICE}":
        lambda c: 2 * c.right,
    "that is the place of the largest group: return its size":
        lambda c: c.windows(c.prefetch + 1).index(max(c.windows(c.prefetch + 1))),
    "that is the group that begins at the largest block: another group may have a larger sum":
        lambda c: c.root + c.windows(c.prefetch + 1)[c.largest_at],
    "that is the group that ends at the largest block: another group may have a larger sum":
        lambda c: c.root + sum(c.blocks[max(0, c.largest_at - c.prefetch):c.largest_at + 1]),
    "that is the largest block with its neighbours on both sides: only blocks that come are gathered":
        lambda c: c.root + sum(c.blocks[max(0, c.largest_at - c.prefetch):c.largest_at + c.prefetch + 1]),
}
# fmt: on


@graded(
    "Your peak is right for blocks of any size and every prefetch.",
    call="most_whole(root, blocks, prefetch)",
    hints=HINTS,
    solution=[most_whole],
)
def check_peak(fn: Callable) -> str | None:
    """Compare fn(root, blocks, prefetch) with the most parameters that are whole at once."""
    outcome = attempt(_answers, [(fn,)])
    if outcome.failure:
        return outcome.failure.replace("rank 0", "your function").replace(", not waiting", "")
    answers, printed = outcome.values[0]
    if all(isinstance(each, Odd) and each.kind == "NoneType" for each in answers):
        return _returned_nothing(fn, printed)
    wrong = [case for case, got in zip(CASES, answers, strict=True) if not _fits(got, case.right)]
    return f"{_mistake(answers, wrong)} (seen with {wrong[0]})" if wrong else None


def _answers(fn: Callable) -> tuple[list[float | Odd], bool]:
    """In the worker: what fn returns in every case, and whether it prints."""
    answers, printed = [], io.StringIO()
    for case in CASES:
        try:
            with contextlib.redirect_stdout(printed):
                value = fn(case.root, list(case.blocks), case.prefetch)
        except Exception as error:
            raise told(error, f"{case}{_few_blocks(case)}") from None
        answers.append(_number(value))
    print(printed.getvalue(), end="")
    return answers, bool(printed.getvalue())


def _returned_nothing(fn: Callable, printed: bool) -> str:
    """Tell a function that is not written from one that has no return."""
    if printed:
        return "your function prints its result and returns None: write return in place of print"
    code = getattr(fn, "__code__", None)
    if code is None or code.co_code != (lambda root, blocks, prefetch: None).__code__.co_code:
        return "your function computes, and returns None: return the number of parameters"
    return "not written yet: the function returned None"


def _few_blocks(case: Case) -> str:
    """Return what is special in a case in which functions stop."""
    count = len(case.blocks)
    if case.prefetch >= count:
        return (
            f". There are {count} blocks, so no {case.prefetch + 1} of them follow each other: then all are "
            "whole. blocks[i : i + prefetch + 1] is shorter near the end, and still a sum to count"
        )
    return ". Here only the block that computes is whole, besides root" if case.prefetch == 0 else ""


def _number(value: Any) -> float | Odd:
    try:
        if not isinstance(value, str | bool):
            return float(value)
    except (TypeError, ValueError):
        pass
    return Odd(type(value).__name__, "" if value is None else repr(value)[:60])


def _fits(got: float | Odd, want: float) -> bool:
    return isinstance(got, float) and abs(got - want) < 1e-6


def _mistake(answers: Sequence[float | Odd], wrong: Sequence[Case]) -> str:
    """Return the mistake or the formula behind all answers, else the mistake behind all wrong ones."""
    given = dict(zip(CASES, answers, strict=True))
    got, case = given[wrong[0]], wrong[0]
    if isinstance(got, Odd):
        said = " ".join(filter(None, got[:2])).replace("NoneType", "None")
        return f"your function returned {said}: return a number of parameters"
    fits = lambda formula, cases: all(_fits(given[c], formula(c)) for c in cases)
    if named := [each for each, formula in MISTAKES.items() if fits(formula, CASES)]:
        return ", or else ".join(named)
    if why := explaining(lambda formula: fits(lambda c: formula(c.root, c.blocks, c.prefetch), CASES)):
        return why
    known = {case: value for case, value in given.items() if isinstance(value, float)}
    if len(known) == len(given) and (why := as_a_sum(known)):
        return f"your function returned {got:g}, and {case.right} parameters are whole: {why}"
    named = [each for each, formula in MISTAKES.items() if fits(formula, wrong)]
    if named and len({each.right for each in wrong}) > 1:  # a single number proves little
        return ", or else ".join(named) + _edge(wrong)
    return f"your function returned {got:g}, and {case.right} parameters are whole{_edge(wrong)}"


def _edge(wrong: Sequence[Case]) -> str:
    """Return what the wrong cases have in common."""
    if all(case.prefetch >= len(case.blocks) for case in wrong):
        return ". It is wrong only where prefetch is larger than the number of blocks: then all are whole"
    if all(case.prefetch == 0 for case in wrong):
        return ". It is wrong only with prefetch=0: then the block that computes is whole, and no other"
    return ""
