"""Answers written by someone who had not seen the checks, and what the checks say of them.

    python tests/blind_answers.py [01_memory_accounting ...]

tests/blind/ has a file for each lesson. Its cells are what a reader would type as the answer of an exercise:

    # %% check_average | divides by the number of ranks twice | you divided twice

A cell's first line has the check, what the author did wrong on purpose, and words that the check's message
has if it names this mistake. The words are empty where the author found no such message. An answer whose
mistake begins with "right" is right, in a style of its own. The exit code is 1 if a wrong answer passed, a
right one was refused, or a message no longer has its words.
"""

import contextlib
import io
import linecache
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from support import ROOT, lessons

ANSWERS = ROOT / "tests/blind"


class Answer(NamedTuple):
    """One cell: the check it is for, what is wrong with it, the words expected, and its code."""

    check: str
    mistake: str
    words: str
    code: str


def answers(path: Path) -> Iterator[Answer]:
    """Read the cells of one lesson's file."""
    _, *cells = re.split(r"^# %% (.*)\n", path.read_text("utf-8"), flags=re.MULTILINE)
    for head, code in zip(cells[::2], cells[1::2], strict=True):
        check, mistake, words = (part.strip() for part in head.split("|"))
        yield Answer(check, mistake, words, code)


def calls(lesson: str) -> dict[str, str]:
    """How the lesson calls each of its checks."""
    lines = [code.strip().rpartition("\n")[2] for code in lessons.code_cells(lesson)]
    return {line.partition("(")[0]: line for line in lines if line.startswith("check_")}


def verdict(answer: Answer, passed: bool, message: str) -> str:
    """What came of one answer."""
    if answer.mistake.startswith("right"):
        return "accepted" if passed else "REFUSED, AND IT IS RIGHT"
    if passed and not message.startswith(("Bronze", "Silver")):
        return "PASSED, AND IT IS WRONG"
    if not answer.words:
        return "not named"
    return "named" if answer.words in message else "OTHER WORDS"


def said(answer: Answer, lesson: str) -> tuple[bool, str]:
    """Run a cell among the lesson's names, as a notebook would, and call its check."""
    names, file = lessons.notebook_names(lesson), f"<ipython-input-1-{answer.mistake}>"
    lines = answer.code.splitlines(keepends=True)
    linecache.cache[file] = len(answer.code), None, lines, file  # where IPython has the source of cells
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(answer.code, file, "exec"), names)
        result = eval(calls(lesson)[answer.check], names)
    return bool(result), result.message


def main(chosen: list[str]) -> int:
    counts: Counter[str] = Counter()
    if unknown := set(chosen) - {path.stem for path in ANSWERS.glob("*.py")}:
        print(f"{', '.join(sorted(unknown))}: no such lesson in {ANSWERS}", file=sys.stderr)
        return 2
    for path in sorted(ANSWERS.glob("*.py")):
        if chosen and path.stem not in chosen:
            continue
        for answer in answers(path):
            passed, message = said(answer, path.stem[3:])
            came = verdict(answer, passed, message)
            counts[came] += 1
            print(f"{path.stem} {answer.check}: {answer.mistake}\n  {came}: {message}\n", flush=True)
    wrong = sum(counts.values()) - counts["accepted"] - counts["REFUSED, AND IT IS RIGHT"]
    print(f"{sum(counts.values())} answers, {wrong} of them wrong: {dict(counts)}")
    if wrong:
        print(f"named: {100 * counts['named'] / wrong:.0f} % of the wrong answers")
    return int(any(came.isupper() or came.startswith(("PASSED", "REFUSED")) for came in counts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
