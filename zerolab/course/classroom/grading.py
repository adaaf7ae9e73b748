"""Grade a notebook: run it, and let the package's own checks judge its objects.

Nothing that the notebook prints or displays is believed, and no function of its kernel is asked. Three things
are taken out of the kernel: the objects that its cells pass to the checks, the letters, and the guesses.
What to ask and what is right comes from this clone. Each object is judged in a process in which no cell ran.
So a redefined check, a patched package or a printed "✓" changes nothing. A program that attacks the grader
itself is not kept out: see docs/teaching.md.
"""

import ast
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from nbformat import NotebookNode

import zerolab
from zerolab.course.classroom import books, children, clone, run_cells
from zerolab.course.classroom.books import Asked, Lesson, Unfit
from zerolab.course.exercise import solution_text
from zerolab.course.questions import is_close
from zerolab.course.quizzes import letters_of

SCHEMA = 1  # of the reports; a change that would break a reader of them adds one
_HAND_IN = """\
from zerolab.course.classroom.hand_in import hand_in as _zerolab_hand_in
_zerolab_hand_in({folder!r}, {number}, {kind!r}, lambda: ({given}))"""

Calls = Mapping[tuple[str, str], tuple[int, Asked]]
"""The last call of each kind and name, with its number."""


class Limits(NamedTuple):
    """Seconds: for a cell and for a check, and for all cells together."""

    cell: int
    all_cells: int


def grade(path: Path, limits: Limits) -> dict[str, Any]:
    """A report on one notebook, as docs/teaching.md describes it. It never raises for what is in the file."""
    report: dict[str, Any] = {"file": str(path), "lesson": None, "error": None, "cell_errors": []}
    report |= {"exercises": [], "quiz": [], "predictions": []}
    try:
        book = books.read(path)
        lesson = books.lesson(books.lesson_of(book))
        calls = _last_calls(book, lesson)
    except Unfit as error:
        return report | {"error": str(error)}
    with tempfile.TemporaryDirectory(prefix="zerolab-grade-") as name, children.none_left():
        folder = Path(name)
        ended_early = _run(book, calls, folder, limits)
        return report | {
            "lesson": lesson.stem,
            "error": ended_early,
            "cell_errors": _cell_errors(folder),
            "exercises": [_exercise(check, lesson, calls, book, folder, limits) for check in lesson.minutes],
            "quiz": _quiz(lesson, calls, folder),
            "predictions": [_prediction(guess, lesson, calls, folder) for guess in lesson.answers],
        }


def _last_calls(book: NotebookNode, lesson: Lesson) -> Calls:
    calls = {(a.kind, a.name): (n, a) for n, a in enumerate(books.asked(book, list(lesson.minutes)))}
    if not any(kind == "exercise" for kind, _ in calls):
        raise Unfit(
            f"has no exercise of {lesson.stem}: no cell calls {' or '.join(lesson.minutes)}. "
            "Restore those cells from the lesson"
        )
    return calls


def _run(book: NotebookNode, calls: Calls, folder: Path, limits: Limits) -> str | None:
    """Run a private copy of the notebook, with a cell below each call; returns why it ended early."""
    copy = nbformat.v4.new_notebook()
    for number, cell in enumerate(books.code_cells(book), 1):
        copy.cells.append(nbformat.v4.new_code_cell(cell.source, metadata={"number": number}))
        for n, each in calls.values():
            if each.cell == number and each.given:
                words = {"folder": str(folder), "number": n, "kind": each.kind, "given": each.given}
                copy.cells.append(nbformat.v4.new_code_cell(_HAND_IN.format(**words)))
    (folder / "work").mkdir()
    nbformat.write(copy, folder / "notebook")
    arguments = (str(folder), str(limits.cell))
    status = children.python("run_cells", *arguments, seconds=limits.all_cells)
    at = _written(folder / "cell") or 1
    if status is None:
        return f"was stopped in cell [{at}] after {limits.all_cells} s, the limit for all cells (--timeout)"
    if status == run_cells.KERNEL_DIED:
        return f"ended its own kernel in cell [{at}], as os._exit does"
    return None if status == 0 else f"could not be run: its kernel did not start or broke in cell [{at}]"


def _cell_errors(folder: Path) -> list[dict]:
    found = _written(folder / "errors")
    found = found if isinstance(found, list) else []
    return [each for each in found if isinstance(each, dict) and each.keys() == {"cell", "error"}]


def _handed_in(call: Asked, path: Path) -> str | None:
    """Return why the value of a call is not there, if it is not."""
    if not call.given:
        return f"cell [{call.cell}] is not Python: a syntax error stops it"
    if path.with_suffix(".error").is_file():
        said = path.with_suffix(".error").read_text("utf-8")
        return f"`{call.given}` of cell [{call.cell}] cannot be taken out of the notebook: {said}"
    return None if path.with_suffix(".ok").is_file() else f"cell [{call.cell}] was not reached"


def _exercise(check, lesson: Lesson, calls: Calls, book: NotebookNode, folder: Path, limits: Limits) -> dict:
    entry = {"name": check, "passed": False, "cell": None, "minutes": lesson.minutes[check]}
    if ("exercise", check) not in calls:
        return entry | {"message": f"No cell calls {check}.", "same_as_solution": False}
    number, call = calls["exercise", check]
    path = folder / str(number)
    missing = _handed_in(call, path)
    passed, message = (False, f"{missing}.") if missing else _judged(lesson.name, check, path, limits)
    source = book.cells[call.place].source
    return entry | {
        "passed": passed,
        "message": message,
        "cell": call.cell,
        "same_as_solution": not missing and _holds_solution(source, lesson.name, check),
    }


def _judged(lesson: str, check: str, path: Path, limits: Limits) -> tuple[bool, str]:
    result = path.with_suffix(".result")
    words = (lesson, check, str(path.with_suffix(".ok")), str(result))
    status = children.python("judge", *words, seconds=limits.cell)
    if status is None:
        return False, f"The check was stopped after {limits.cell} s (--cell-timeout)."
    found = _written(result)
    if status or not isinstance(found, dict):
        return False, f"The process of the check ended with status {status} and without a result."
    return found["passed"] is True, str(found["message"])


def _holds_solution(source: str, lesson: str, check: str) -> bool:
    """Return whether the cell has the package's solution in it, apart from comments and blanks."""
    ours = solution_text(getattr(clone.room(lesson), check).source)
    return set(map(ast.dump, ast.parse(ours).body)) <= set(map(ast.dump, books.tree(source).body))


def _written(path: Path) -> Any:
    """Return the JSON in a file, or None; a cell may have put anything in its place."""
    try:
        return json.loads(path.read_text("utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None


def _value(key: tuple[str, str], calls: Calls, folder: Path) -> Any:
    """Return the guess or the letters that a notebook handed over, or None."""
    return _written(folder / f"{calls[key][0]}.ok") if key in calls else None


def _quiz(lesson: Lesson, calls: Calls, folder: Path) -> list[dict]:
    given = _value(("quiz", "QUESTIONS"), calls, folder)
    given = [... if each is None else each for each in given] if isinstance(given, list) else given
    try:
        letters = [] if given is None else letters_of(given, lesson.questions)
    except ValueError:  # which the cell raised, too
        letters = []
    letters += [...] * (len(lesson.questions) - len(letters))
    return [
        {"question": number, "answer": None, "right": None}
        if letter is ...
        else {"question": number, "answer": letter, "right": letter == question.right}
        for number, (letter, question) in enumerate(zip(letters, lesson.questions, strict=True), 1)
    ]


def _prediction(name: str, lesson: Lesson, calls: Calls, folder: Path) -> dict:
    guess = _value(("prediction", name), calls, folder)
    call = calls.get(("prediction", name))
    right = isinstance(guess, int | float) and is_close(guess, *lesson.answers[name])
    cell = call[1].cell if call else None
    return {"name": name, "guess": guess, "right": None if guess is None else right, "cell": cell}


def envelope(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the reports of a class, as ``--json`` prints them."""
    return {"schema": SCHEMA, "zerolab": zerolab.__version__, "notebooks": reports}
