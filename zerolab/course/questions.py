"""Predictions: compare a reader's guess with the answer, and name the mistake behind a wrong one.

The question is in the lesson's text. The known mistakes are in the lesson's ``quiz.py``, so that nobody reads
an answer together with its question.
"""

import html
import sys
from collections.abc import Mapping, Sequence
from types import EllipsisType, ModuleType
from typing import NamedTuple

from IPython.display import display

from zerolab.course.classroom.record import quiz_in_notebook, remember
from zerolab.course.wording import shortened

# A size in bytes can be confused with its binary namesake, which is 1024/1000 larger once, twice or more.
_BYTE_UNITS = {"KB": ("KiB", 1), "MB": ("MiB", 2), "GB": ("GiB", 3), "TB": ("TiB", 4)}


class Prediction(NamedTuple):
    """A number to guess: each known mistake ("you ...") with its number, unit, tolerance, and the reason."""

    mistakes: Mapping[str, float]
    unit: str = ""
    tolerance: float = 0.02
    why: str = ""


def predict(guess: float | EllipsisType, answer: float, prediction: Prediction, *measured: str) -> None:
    """Print how far a guess is from the answer, and which mistake leads to it if it is a known wrong number.

    Confused units (GiB for GB, bits for bytes, a power of ten) are recognised without being listed. The lines
    `measured` and the prediction's reason follow. For an unanswered guess (`...`) all of this is folded: a
    reader guesses first, and a page that is only read holds as much as one that is run.

    Raises: TypeError for a guess that is not a number, ValueError for one that is infinite or nan.
    """
    unit, why = prediction.unit, [prediction.why] if prediction.why else []
    if guess is ...:
        asked = "No guess yet: put a number in place of the ... and run this cell again."
        known = [f"{_number(value, unit)}: {mistake}." for mistake, value in prediction.mistakes.items()]
        display_folded(asked, "The answer", [f"{_number(answer, unit)}.", *why, *known], measured)
        return
    of_unit = f" of {unit}" if unit else ""
    if isinstance(guess, bool) or not isinstance(guess, (int, float)):
        raise TypeError(f"my_guess is {guess!r}: write a plain number{of_unit}, such as 12.5")
    if not abs(guess) < sys.float_info.max:  # nan, too; a large int has no float
        raise ValueError(f"my_guess is {shortened(str(guess))}: write a finite number{of_unit}, such as 12.5")
    print("\n".join([_verdict(guess, answer, prediction), *why, *measured]))
    name = _name_of(prediction, quiz := quiz_in_notebook())
    remember(quiz, "prediction", name, is_close(guess, answer, prediction.tolerance))


def _name_of(prediction: Prediction, quiz: ModuleType | None) -> str:
    """Return the prediction's name in the quiz; one that a function makes goes by its mistakes."""
    names = [name for name, value in vars(quiz).items() if value is prediction] if quiz else []
    return names[0] if names else " ".join(prediction.mistakes)[:100]


def _verdict(guess: float, answer: float, prediction: Prediction) -> str:
    unit, tolerance = prediction.unit, prediction.tolerance
    if is_close(guess, answer, tolerance):
        return f"Right: {_number(answer, unit)}."
    for mistake, value in {**prediction.mistakes, **_confused_units(answer, unit)}.items():
        if is_close(guess, value, tolerance):
            return f"{_number(guess, unit)}: {mistake}. It is {_number(answer, unit)}."
    said = f"You said {_number(guess, unit)}; it is {_number(answer, unit)}"
    if guess * answer <= 0:
        return f"{said}."
    factor = guess / answer
    ratio = max(factor, 1 / factor)
    by = f"{ratio:.2g} times" if ratio >= 1.5 else f"{100 * abs(factor - 1):.2g} %"
    return f"{said}: {by} too {'much' if factor > 1 else 'little'}."


def _confused_units(answer: float, unit: str) -> dict[str, float]:
    if unit not in _BYTE_UNITS:
        return {}
    binary, power = _BYTE_UNITS[unit]
    units = f"1 {unit} is 10^{3 * power} bytes, 1 {binary} is 2^{10 * power}"
    return {
        f"that is bytes, and the answer is in {unit}": answer * 1000.0**power,
        f"you gave the size in {binary} ({units})": answer / 1.024**power,
        f"you multiplied by 1024 where you should divide ({units})": answer * 1.024**power,
        "you counted bits, and a byte has eight of them": answer * 8,
        "you gave one eighth: did you take the bytes for bits": answer / 8,
        "you have a thousand times too much: check the power of ten": answer * 1e3,
        "you have a thousand times too little: check the power of ten": answer / 1e3,
    }


def is_close(value: float, target: float, tolerance: float) -> bool:
    """Return whether a guess counts as right."""
    return abs(value - target) <= tolerance * abs(target)


def _number(value: float, unit: str) -> str:
    if value == 1 and unit.isalpha() and len(unit) > 3:  # a word such as blocks, and not ms
        unit = unit.removesuffix("s")
    return f"{value:,.4g} {unit}".rstrip() if abs(value) < 1e4 else f"{value:,.0f} {unit}".rstrip()


def display_folded(asked: str, summary: str, lines: Sequence[str], measured: Sequence[str] = ()) -> None:
    """Show what to do, and below it the lines, which a click unfolds. Text alone has none of them."""
    first, *rest = [f"<p>{in_html(line)}</p>" for line in lines]
    table = f"<pre>{html.escape(chr(10).join(measured), quote=False)}</pre>" if measured else ""
    folded = "".join([first, table, *rest])
    page = f"<p>{in_html(asked)}</p><details><summary>{summary}</summary>{folded}</details>"
    display({"text/plain": asked, "text/html": page}, raw=True)


def in_html(words: str) -> str:
    """Return the words as HTML; what stands between backticks is code."""
    plain, *rest = html.escape(words, quote=False).split("`")
    return plain + "".join(
        f"{'<code>' if place % 2 == 0 else '</code>'}{part}" for place, part in enumerate(rest)
    )
