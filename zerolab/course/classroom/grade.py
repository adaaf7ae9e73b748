"""Run the command ``python -m zerolab grade``."""

import json
import signal
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from zerolab.course.classroom.grading import Limits, envelope, grade
from zerolab.flags import at_least

NOT_PASSED, NOT_GRADED = 1, 3  # exit statuses; 2 is a wrong flag, as for every command
_MARKS = {True: "✓", False: "✗", None: "·"}


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of ``python -m zerolab grade``."""
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE.ipynb", help="notebooks that were handed in")
    add("--json", action="store_true", help="print JSON, whose keys docs/teaching.md lists")
    add("--cell-timeout", type=at_least(1), default=300, metavar="SECONDS",
        help="for each cell, and for each check (default 300)")  # fmt: skip
    add("--timeout", type=at_least(1), default=1800, metavar="SECONDS",
        help="for all cells of a notebook together (default 1800)")  # fmt: skip
    parser.epilog = (
        f"Exit status: 0 all exercises passed, {NOT_PASSED} some did not, {NOT_GRADED} some notebook could "
        "not be run to its end. The cells run as your user: grade in a container what you do not trust."
    )


def run(args: Namespace) -> int:
    """Grade one notebook after the other; what is printed for people appears as it is known."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended first
    reports = []
    for path in args.files:
        print(f"grading {path} ...", file=sys.stderr, flush=True)
        reports.append(grade(path, Limits(args.cell_timeout, args.timeout)))
        if not args.json:
            print(as_text(reports[-1]), flush=True)
    if args.json:
        print(json.dumps(envelope(reports), indent=2, ensure_ascii=False))
    if any(report["error"] for report in reports):
        return NOT_GRADED
    passed = all(exercise["passed"] for report in reports for exercise in report["exercises"])
    return 0 if passed else NOT_PASSED


def as_text(report: dict[str, Any]) -> str:
    """Return a report for people."""
    lines = [f"{report['file']}" + (f" ({report['lesson']})" if report["lesson"] else "")]
    if report["error"]:
        lines.append(_wrapped(f"  ! it {report['error']}."))
    lines += [
        _wrapped(f"  ! cell [{each['cell']}] stops with {each['error']}") for each in report["cell_errors"]
    ]
    for each in report["exercises"]:
        where = f" [{each['cell']}]" if each["cell"] else ""
        copied = " The cell is the package's own solution." if each["same_as_solution"] else ""
        lines.append(_wrapped(f"  {_MARKS[each['passed']]} {each['name']}{where}: {each['message']}{copied}"))
    if report["quiz"]:
        letters = " ".join(f"{each['question']}{_MARKS[each['right']]}" for each in report["quiz"])
        lines.append(f"    quiz: {letters} ({_count(report['quiz'])})")
    if report["predictions"]:
        lines.append(f"    predictions: {_count(report['predictions'])}")
    return "\n".join(lines) + "\n"


def _count(entries: list[dict[str, Any]]) -> str:
    right = sum(each["right"] is True for each in entries)
    empty = sum(each["right"] is None for each in entries)
    return f"{right} of {len(entries)} right, {empty} unanswered"


def _wrapped(line: str) -> str:
    return textwrap.fill(line, width=100, subsequent_indent="      ")
