"""Read from a notebook's source which checks, predictions and answers it calls.

Nothing runs here. The lessons' own notebooks are read in the same way as those that were handed in.
"""

import ast
import functools
import html
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

import zerolab
from zerolab.course.classroom import clone
from zerolab.course.classroom.clone import NOTEBOOKS, ROOMS, lesson_paths
from zerolab.course.questions import Prediction
from zerolab.course.quizzes import Quiz


class Unfit(ValueError):
    """Why a notebook cannot be graded."""


class Asked(NamedTuple):
    """A call with which a reader hands something over.

    `kind` is exercise, quiz or prediction. `given` is the source of the call's first argument; it is empty
    where the cell is not Python. `cell` counts code cells from 1, `place` all cells from 0.
    """

    kind: str
    name: str
    given: str
    cell: int
    place: int


class Lesson(NamedTuple):
    """A lesson as the package and its own notebook have it: what is expected, and the right answers.

    `minutes`: of each check, in order. `answers`: of each prediction, with its tolerance.
    """

    name: str
    stem: str
    minutes: Mapping[str, int | None]
    answers: Mapping[str, tuple[float, float]]
    questions: Sequence[Quiz]


def read(path: Path) -> NotebookNode:
    """Return a notebook without its outputs, which do not count.

    Raises: Unfit for what is not a sound notebook.
    """
    try:
        book = nbformat.reads(path.read_text("utf-8"), as_version=4)
        for cell in code_cells(book):
            cell.outputs, cell.execution_count = [], None
        nbformat.validate(book)
        nbformat.writes(book).encode()
    except OSError as error:
        raise Unfit(f"cannot be read: {error.strerror}") from None
    except Exception as error:  # nbformat raises whatever it stumbles on
        first = str(error).strip().partition("\n")[0][:200]
        raise Unfit(f"is not a notebook ({first}): save it in Jupyter as .ipynb") from None
    return book


def code_cells(book: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def asked(book: NotebookNode, checks: Sequence[str]) -> Iterator[Asked]:
    """Every call of `checks`, of predict and of answer, in order."""
    places = [place for place, cell in enumerate(book.cells) if cell.cell_type == "code"]
    for number, place in enumerate(places, 1):
        source = book.cells[place].source
        try:
            calls = [node for node in ast.walk(tree(source)) if isinstance(node, ast.Call)]
        except SyntaxError:
            names = [name for name in checks if re.search(rf"\b{name}\(", source)]
            yield from (Asked("exercise", name, "", number, place) for name in names)
            continue
        for call in sorted(calls, key=lambda node: node.lineno):
            if (found := _kind_and_name(call, checks)) is not None:
                yield Asked(*found, ast.unparse(call.args[0]), number, place)


def tree(source: str) -> ast.Module:
    """Return the cell's syntax; a magic or a shell command becomes a call, as IPython does it.

    Raises: SyntaxError for whatever Python cannot compile.
    """
    try:
        return ast.parse(TransformerManager().transform_cell(source))
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte; a thousand brackets
        raise SyntaxError(str(error)) from None


def _kind_and_name(call: ast.Call, checks: Sequence[str]) -> tuple[str, str] | None:
    name = ast.unparse(call.func).rpartition(".")[2]
    if name in checks and call.args:
        return "exercise", name
    if name == "answer" and len(call.args) == 2:
        return "quiz", "QUESTIONS"
    if name == "predict" and len(call.args) >= 3:  # quiz.STAGE_1, or quiz.traffic(numels)
        return "prediction", ast.unparse(call.args[2]).partition("(")[0].rpartition(".")[2]
    return None


def lesson_of(book: NotebookNode) -> str:
    """Return the name of the lesson that a notebook is a copy of: the one whose check and quiz it imports.

    Raises: Unfit where it imports none, or what this version of zerolab does not have.
    """
    names = []
    for module, name in _imports(book):
        if module.startswith(ROOMS):
            names.append(module.removeprefix(ROOMS).partition(".")[0])
        if not _exists(module, name):
            raise Unfit(
                f"imports {name} from {module}, which zerolab {zerolab.__version__} does not have: "
                "grade it with the clone of the version that it was made with, or begin with a new handout"
            )
    if not names:
        lessons = ", ".join(path.stem for path in lesson_paths().values())
        raise Unfit(
            f"is no lesson: no cell of valid Python imports from {ROOMS}NAME. The lessons are {lessons}"
        )
    if names[0] not in lesson_paths():
        raise Unfit(f"belongs to the lesson {names[0]}, whose notebook is not in {NOTEBOOKS}")
    return names[0]


def _imports(book: NotebookNode) -> Iterator[tuple[str, str]]:
    for cell in code_cells(book):
        try:
            nodes = list(ast.walk(tree(cell.source)))
        except SyntaxError:
            continue
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("zerolab."):
                yield from ((str(node.module), alias.name) for alias in node.names)


def _exists(module: str, name: str) -> bool:
    try:
        return name == "*" or hasattr(importlib.import_module(module), name) or _is_module(module, name)
    except ImportError:
        return False


def _is_module(module: str, name: str) -> bool:
    return importlib.util.find_spec(f"{module}.{name}") is not None


@functools.cache
def lesson(name: str) -> Lesson:
    """What a lesson expects. It comes from this clone, and never from a notebook that was handed in."""
    path = lesson_paths()[name]
    book = nbformat.read(path, as_version=4)
    quiz = clone.quiz(name)
    calls = list(asked(book, clone.checks(name)))
    minutes = {each.name: _minutes(book, each.place) for each in calls if each.kind == "exercise"}
    guesses = [each for each in calls if each.kind == "prediction"]
    answers = {each.name: (_answer(book.cells[each.place]), _tolerance(quiz, each.name)) for each in guesses}
    return Lesson(name, path.stem, minutes, answers, quiz.QUESTIONS)


def _minutes(book: NotebookNode, place: int) -> int | None:
    """Return what the box above an exercise says."""
    boxes = [
        found for cell in book.cells[:place] for found in re.findall(r"· (\d+) minutes\.\*\*", cell.source)
    ]
    return int(boxes[-1]) if boxes else None


def _answer(cell: NotebookNode) -> float:
    """Return the right number of a prediction, which the lesson's committed output holds folded."""
    pages = "".join(output.get("data", {}).get("text/html", "") for output in cell.outputs)
    found = re.search(r"<summary>The answer</summary><p>(-?[\d.,]*\d(?:e[+-]?\d+)?)", html.unescape(pages))
    return float(found[1].replace(",", "")) if found else float("nan")


def _tolerance(quiz: ModuleType, name: str) -> float:
    """Of a prediction, or of the one that a function of the quiz makes."""
    prediction = getattr(quiz, name)
    if isinstance(prediction, Prediction):
        return prediction.tolerance
    written = re.search(r"tolerance=([\d.]+)", inspect.getsource(prediction))
    return float(written[1]) if written else Prediction({}).tolerance
