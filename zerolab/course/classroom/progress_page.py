"""Show progress over the lessons, in a notebook and as ``python -m zerolab progress``."""

import html
import pkgutil
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass

from zerolab.course import lessons
from zerolab.course.classroom import clone, record

_HEADS = ("lesson", "exercises passed", "quiz answers right", "guesses right")


@dataclass(repr=False)
class Page:
    """A table with a row for each lesson, and a line on where the record is."""

    rows: list[tuple[str, ...]]
    note: str

    def __repr__(self) -> str:
        table = [_HEADS, *self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        return "\n".join([*lines, "", self.note])

    def _repr_html_(self) -> str:
        """Return the same for a notebook; it has the page's own colours, so it suits a dark theme."""
        heads = "".join(f'<th scope="col">{head}</th>' for head in _HEADS)
        body = "".join(
            f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>"
            for first, *rest in self.rows
        )
        caption = f"<caption>My progress. {html.escape(self.note)}</caption>"
        return f"<table>{caption}<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def my_progress() -> Page:
    """Return what you have done of each lesson on this machine."""
    path = record.place()
    if path is None:
        return Page(_rows({}), "Nothing is recorded, because ZEROLAB_PROGRESS is off.")
    try:
        return Page(_rows(record.read(path)), f"This is kept in {path}, and sent nowhere.")
    except OSError as error:
        way_out = "./zero progress --reset removes it" if path.is_file() else "set ZEROLAB_PROGRESS to a file"
        return Page(_rows({}), f"{path} cannot be read ({error.strerror}): {way_out}.")


def _rows(done: dict[record.Entry, bool]) -> list[tuple[str, ...]]:
    try:
        stems = {name: path.stem for name, path in clone.lesson_paths().items()}
    except ValueError:  # the package without its clone
        stems = {module.name: module.name for module in pkgutil.iter_modules(lessons.__path__)}
    return [(stem, *_cells(name, done)) for name, stem in stems.items()]


def _cells(name: str, done: dict[record.Entry, bool]) -> list[str]:
    questions, checks = clone.quiz(name).QUESTIONS, clone.checks(name)
    of = lambda kind: {entry.name: right for entry, right in done.items() if entry[:2] == (name, kind)}
    passed = sum(of("exercise").get(check, False) for check in checks)
    guesses = of("prediction").values()
    asked = max(clone.predictions(name), len(guesses))
    right = sum(of("quiz").get(str(number), False) for number in range(1, len(questions) + 1))
    return [f"{passed} of {len(checks)}", f"{right} of {len(questions)}", f"{sum(guesses)} of {asked}"]


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of ``python -m zerolab progress``."""
    parser.add_argument("--reset", action="store_true", help="forget all of it: remove the file")


def run(args: Namespace) -> int:
    """Print the page, or remove the record."""
    path = record.place()
    if not args.reset:
        print(my_progress())
        return 0
    if path is None:
        raise ValueError("there is no record to remove, because ZEROLAB_PROGRESS is off: unset it")
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be removed: {error.strerror}") from None
    print(f"removed {path}")
    return 0
