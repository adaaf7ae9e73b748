"""Run the command ``python -m zerolab handout FOLDER``: write the lessons as a class gets them.

A lesson's committed notebook holds the folded answers of its predictions and quiz in its outputs, and some in
its prose. A handout has neither, and no badges, because they open the committed notebooks.
"""

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace

import nbformat
from nbformat import NotebookNode

from zerolab.course.classroom import books, clone
from zerolab.flags import folder

_ANSWERS = re.compile(r"<details>\s*<summary>Answers?</summary>.*?</details>\n*", re.S)
_ADDRESS = re.compile(r"colab\.research\.google\.com/github/([\w.-]+/[\w.-]+)/blob/")
_TEST = """\
# Graded by nbgrader. Do not change this cell.
from {room} import {check}

assert {check}({given})"""
_QUIZ_TEST = """\
# Graded by nbgrader: a point for each right answer. Do not change this cell.
from {room} import quiz
from zerolab.course.quizzes import number_right

number_right({given}, quiz.QUESTIONS)"""


def lesson(text: str) -> str:
    """An argument's type: the name of a lesson, such as ``00_ranks``."""
    stems = [path.stem for path in clone.lesson_paths().values()]
    if text not in stems:
        raise ArgumentTypeError(f"{text!r} is not a lesson; there are {', '.join(stems)}")
    return text


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of ``python -m zerolab handout``."""
    add = parser.add_argument
    add("folder", type=folder, metavar="FOLDER", help="where the notebooks go; it is made if it is not there")
    add("lessons", nargs="*", type=lesson, default=[], metavar="LESSON", help="as 00_ranks; default: all")
    add("--nbgrader", action="store_true", help="with a locked, graded cell below each exercise and quiz")
    add("--force", action="store_true", help="write into a folder that has files, and replace those lessons")


def run(args: Namespace) -> int:
    """Write the lessons."""
    if args.folder.exists() and any(args.folder.iterdir()) and not args.force:
        raise ValueError(
            f"{args.folder} is not empty: name a new folder, or pass --force, which replaces its lessons"
        )
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{args.folder} cannot be made: {error.strerror}. Name another folder") from None
    for name, path in clone.lesson_paths().items():
        if not args.lessons or path.stem in args.lessons:
            book = handout(nbformat.read(path, as_version=4))
            nbformat.write(graded(book, name) if args.nbgrader else book, args.folder / path.name)
            print(f"wrote {args.folder / path.name}")
    return 0


def handout(book: NotebookNode) -> NotebookNode:
    """Return the notebook without outputs, answers, widgets and badges; its links lead to the repository."""
    repository = next(iter(_ADDRESS.findall(nbformat.writes(book))), None)
    book.metadata.pop("widgets", None)
    book.cells = [cell for cell in book.cells if cell.id != "badges"]
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            continue
        cell.source = _ANSWERS.sub("", cell.source)
        if repository:
            cell.source = cell.source.replace("](../", f"](https://github.com/{repository}/blob/main/")
    book.cells = [cell for cell in book.cells if cell.source.strip()]
    return book


def graded(book: NotebookNode, name: str) -> NotebookNode:
    """Return the notebook with nbgrader's tests: an exercise is worth its minutes, a quiz its questions."""
    ours = books.lesson(name)
    below: dict[int, NotebookNode] = {}
    for call in books.asked(book, list(ours.minutes)):
        words = {"room": clone.room(name).__name__, "check": call.name, "given": call.given}
        if call.kind == "exercise":
            below[call.place] = _test(_TEST.format(**words), call.name, ours.minutes[call.name] or 10)
        elif call.kind == "quiz":
            below[call.place] = _test(_QUIZ_TEST.format(**words), f"{name}_quiz", len(ours.questions))
    pairs = ((cell, below.get(place)) for place, cell in enumerate(book.cells))
    book.cells = [each for pair in pairs for each in pair if each is not None]
    return book


def _test(source: str, identity: str, points: int) -> NotebookNode:
    """Return a cell that nbgrader runs for points, and restores where a student changed it."""
    flags = {"grade": True, "solution": False, "locked": True, "task": False, "schema_version": 3}
    mark = flags | {"grade_id": identity, "points": points, "cell_type": "code"}
    cell = nbformat.v4.new_code_cell(source, id=identity.replace("_", "-"))
    cell.metadata = NotebookNode({"nbgrader": mark, "deletable": False, "editable": False})
    return cell
