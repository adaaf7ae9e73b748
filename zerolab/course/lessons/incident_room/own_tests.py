"""Lesson 09's exercise: a test that passes with the right engine and fails with each broken one."""

import ast
import inspect
import linecache
import textwrap
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from zerolab.course.attempts import attempt
from zerolab.course.exercise import graded
from zerolab.course.lessons.incident_room.caught import failed_asserts
from zerolab.course.lessons.incident_room.engines import BROKEN, RIGHT
from zerolab.course.lessons.incident_room.part_two_solution import my_test
from zerolab.course.lessons.incident_room.shown import alike, measured, not_clipped, shown
from zerolab.course.lessons.incident_room.trainings import MOST_RANKS, Ranks, Trainer
from zerolab.course.messages import own_place
from zerolab.parity import compute_deterministically

RIGHT_SECONDS, BROKEN_SECONDS = 30.0, 120.0
HINTS = (
    "begin with the values: torch.equal(run.parameters[rank], run.alone), on every rank and at every stage. "
    "Then let the check say what passes your test.",
    "many mistakes need something to show in: three ranks, two micro-batches, a second step, clip=0.1. One "
    "training can have all of them.",
    'memory.model_states(run.psi, ranks, stage, "fp32", k=4) says what a rank holds (SGD with momentum '
    "remembers 4 bytes a parameter), and 4 * cost.communication_volume(run.psi, stage, micro_batches, "
    "reduce_each=True) what it sends. Assert both at every stage.",
)


class Verdict(NamedTuple):
    """What a test said of one engine.

    Attributes:
        calls: how often it called train.
        returned: what it returned, in words, if that is not None.
        error: the kind of exception that it ended with; "" if it passed.
        text: the exception's text, or else the values that an assert compared.
        place: the reader's line.
        measured: what the engine sent or held, where the text is about that.
        shown: where a test has passed, what its trainings show all the same.
        alike: the settings that all of its trainings have.
        unclipped: where a test has passed, which of its norms clip nothing.
        caught: where a test has passed, the place of an AssertionError that it has caught itself.
    """

    calls: int
    returned: str = ""
    error: str = ""
    text: str = ""
    place: str = ""
    measured: str = ""
    shown: str = ""
    alike: str = ""
    unclipped: str = ""
    caught: str = ""


@graded(
    f"Your test passes with the right engine, and it finds all {len(BROKEN)} broken ones.",
    call="my_test(train)",
    hints=HINTS,
    solution=[my_test],
)
def check_test(fn: Callable) -> str | None:
    """Run fn(train) with the right engine and with broken ones, and name those that it lets pass."""
    right, stopped = _verdicts(fn, RIGHT_SECONDS)
    if problem := stopped or _fails_what_is_right(right):
        return problem
    broken, stopped = _verdicts(fn, BROKEN_SECONDS, broken=True)
    if stopped:
        return f"with a broken engine, {stopped}"
    survivors = {
        engine.does: verdict for engine, verdict in zip(BROKEN, broken, strict=True) if not verdict.error
    }
    if not survivors:
        return None
    if place := _always_true(fn):
        return (
            f"{place} asserts a tuple, and a tuple that is not empty is always true: write assert condition, "
            "text without parentheses around both"
        )
    if place := next((verdict.caught for verdict in survivors.values() if verdict.caught), ""):
        return (
            "your test catches its own AssertionError, and passes although an assert has failed. "
            f"{len(survivors)} of {len(BROKEN)} broken engines pass it. Let the error out, or raise it again "
            f"({place})"
        )
    found = len(BROKEN) - len(survivors)
    listed = "".join(f"\n  - an engine that {does}{_seen(verdict)}" for does, verdict in survivors.items())
    said = f"your test finds {found or 'none'} of {len(BROKEN)} broken engines. These pass it:{listed}"
    return said + _advice(list(survivors.values()))


def _always_true(fn: Callable) -> str | None:
    """Return the line of an assert whose condition is a tuple, as in ``assert (a == b, "text")``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    except (OSError, TypeError, SyntaxError):
        return None
    found = [each for each in ast.walk(tree) if isinstance(each, ast.Assert)]
    tuples = [each for each in found if isinstance(each.test, ast.Tuple) and each.test.elts]
    return f"line {tuples[0].lineno} of {fn.__name__}" if tuples else None


def _seen(verdict: Verdict) -> str:
    return f" ({verdict.shown})" if verdict.shown else " (no training of yours shows it)"


def _advice(survivors: list[Verdict]) -> str:
    """What a test needs: asserts for what its trainings show, and trainings that show the rest."""
    said = ""
    if any(verdict.shown for verdict in survivors):
        said += (
            "\nWhere a training shows it, your test asserts nothing of that, or allows for a difference. Use "
            "torch.equal for values and == for bytes, on every rank"
        )
    hidden = next((verdict for verdict in survivors if not verdict.shown), None)
    if hidden and hidden.alike:
        both = ". " if said else "\n"
        said += (
            f"{both}All your trainings have {hidden.alike}: the other engines need other settings to show in"
        )
    if hidden and hidden.unclipped:
        said += f"{'. ' if said else chr(10)}{hidden.unclipped}"
    return said


def _verdicts(fn: Callable, seconds: float, broken: bool = False) -> tuple[list[Verdict], str | None]:
    """What the test says of each engine, or why it did not come to its end."""
    outcome = attempt(_try, [(fn, broken)] * MOST_RANKS, timeout=seconds)
    if outcome.failure:
        return [], outcome.failure.replace("rank 0's process", "its process").replace("rank 0", "your test")
    return outcome.values[0], None


def _try(fn: Callable, broken: bool) -> list[Verdict]:
    """In the worker: rank 0 runs the test with one engine after the other; the others train with it."""
    compute_deterministically()  # the bits of one process on a GPU too
    engines = BROKEN if broken else RIGHT
    with _disable_current_modes():  # these messages are not the reader's
        ranks = Ranks(engines)
        if dist.get_rank() > 0:
            ranks.serve()
            return []
        with ranks.serving():
            return [_verdict(fn, Trainer(ranks, number)) for number in range(len(engines))]


def _verdict(fn: Callable, train: Trainer) -> Verdict:
    try:
        with failed_asserts() as failed:
            returned = fn(train)
    except (Exception, SystemExit) as error:
        text = str(error).strip().partition("\n")[0][:300]
        place, frame = None, None
        for each, line in traceback.walk_tb(error.__traceback__):
            if own := own_place([(each.f_code.co_filename, line, each.f_code.co_name)]):
                place, frame = own, each  # the innermost is the last
        if place and frame and not text and isinstance(error, AssertionError):
            text = compared(frame, place.file, place.line)
        about = measured(train.runs, text) if isinstance(error, AssertionError) else ""
        return Verdict(train.calls, "", type(error).__name__, text, str(place or ""), about)
    said = "" if returned is None else f"{type(returned).__name__} {repr(returned)[:40]}"
    seen = Verdict(train.calls, said, caught=failed[0] if failed else "")
    if not train.runs:
        return seen
    unclipped = not_clipped(train.runs)
    return seen._replace(shown=shown(train.runs), alike=alike(train.runs), unclipped=unclipped)


def compared(frame: FrameType, file: str, line: int) -> str:
    """The two values that an assert in that line compared, or nothing where no assert compares any."""
    value_of = lambda node: eval(ast.unparse(node), {**frame.f_globals, **frame.f_locals})
    try:
        test = _failed(ast.parse("".join(linecache.getlines(file))), line, value_of)
        both = [test.left, *test.comparators]  # type: ignore[attr-defined]
        sides = [side for side in both if not isinstance(side, ast.Constant)]
        return ", ".join(f"{ast.unparse(side)} is {_short(value_of(side))}" for side in sides)
    except Exception:
        return ""


def _failed(tree: ast.Module, line: int, value_of: Callable[[ast.expr], Any]) -> ast.expr:
    """The condition that does not hold, of the asserts in that line; one of those that an ``and`` joins."""
    asserts = [each for each in ast.walk(tree) if isinstance(each, ast.Assert)]
    tests = [each.test for each in asserts if each.lineno <= line <= (each.end_lineno or each.lineno)]
    test = tests[0] if len(tests) == 1 else next(each for each in tests if not value_of(each))
    while isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        test = next(each for each in test.values if not value_of(each))
    return test


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) < 60 else f"{text[:60]}…"


def _fails_what_is_right(verdicts: list[Verdict]) -> str | None:
    """Why a test cannot be used: it says something wrong of an engine that is right, or nothing.

    The settings of that engine matter only where the test passes with others.
    """
    all_fail = all(verdict.error for verdict in verdicts)
    for engine, verdict in zip(RIGHT, verdicts, strict=True):
        at = f" ({verdict.place})" if verdict.place else ""
        if verdict.error == "SystemExit":
            return f"your test called sys.exit: let it return, and use assert for what must hold{at}"
        if verdict.error:
            said = f"{verdict.error}{f': {verdict.text}' if verdict.text else ''}"
            does = "is right" if all_fail else engine.does
            return f"your test fails with an engine that {does}: {said}{at}{verdict.measured}"
        if verdict.returned:
            return (
                f"your test returns {verdict.returned}, and nobody looks at it: a test says assert, and "
                "raises AssertionError where that does not hold"
            )
        if not verdict.calls:
            return "not written yet: your test never calls train, so it knows nothing of the engine"
    return None
