"""Predictions and quizzes: a reader answers first, and learns which mistake a wrong answer comes from.

What is asked stands in a lesson's text, what explains the answers in the lesson's ``quiz.py``, so that nobody
reads an answer together with its question.
"""

import html
from collections.abc import Iterable, Mapping
from types import EllipsisType
from typing import NamedTuple

from IPython.display import display

# A size in bytes can be confused with its binary namesake, which is 1024/1000 larger once, twice or more.
_BYTE_UNITS = {"KB": ("KiB", 1), "MB": ("MiB", 2), "GB": ("GiB", 3), "TB": ("TiB", 4)}


class Prediction(NamedTuple):
    """A number to guess: the known mistakes with the numbers they lead to, the unit, and the tolerance."""

    mistakes: Mapping[str, float]
    unit: str = ""
    tolerance: float = 0.02


class Quiz(NamedTuple):
    """A question with lettered answers: the right letter, and the reason for each letter."""

    right: str
    reasons: Mapping[str, str]


def predict(guess: float | EllipsisType, answer: float, prediction: Prediction) -> None:
    """Print how far a guess is from the answer, and which mistake leads to it if it is a known wrong number.

    Confused units (GiB for GB, bits for bytes, a power of ten) are recognised without being listed. For an
    unanswered guess (`...`) the answer and the known wrong numbers are displayed folded: a reader guesses
    first, and a page that is only read holds as much as one that is run.

    Raises: TypeError for a guess that is not a number.
    """
    unit = prediction.unit
    if guess is ...:
        asked = "No guess yet: put a number in place of the ... and run this cell again."
        known = [f"{_number(value, unit)} would mean: {text}." for text, value in prediction.mistakes.items()]
        _display_folded(asked, "The answer", [f"{_number(answer, unit)}.", *known])
        return
    if isinstance(guess, bool) or not isinstance(guess, (int, float)):
        of_unit = f" of {unit}" if unit else ""
        raise TypeError(f"my_guess is {guess!r}: write a plain number{of_unit}, such as 12.5")
    print(_verdict(guess, answer, prediction))


def _verdict(guess: float, answer: float, prediction: Prediction) -> str:
    mistakes, unit, tolerance = prediction
    if _close(guess, answer, tolerance):
        return f"Right: {_number(answer, unit)}."
    said = f"You said {_number(guess, unit)}; it is {_number(answer, unit)}"
    for sentence, value in {**mistakes, **_confused_units(answer, unit)}.items():
        if _close(guess, value, tolerance):
            return f"{said}. A known mistake: {sentence}."
    if guess * answer <= 0:
        return f"{said}."
    factor = guess / answer
    return f"{said}: {max(factor, 1 / factor):.2g} times too {'much' if factor > 1 else 'little'}."


def _confused_units(answer: float, unit: str) -> dict[str, float]:
    if unit not in _BYTE_UNITS:
        return {}
    binary, power = _BYTE_UNITS[unit]
    units = f"1 {unit} is 10^{3 * power} bytes, 1 {binary} is 2^{10 * power}"
    return {
        f"that is the size in {binary} ({units})": answer / 1.024**power,
        f"you multiplied by 1024 where you should divide ({units})": answer * 1.024**power,
        "that is bits, and a byte has eight of them": answer * 8,
        "that is one eighth: did you take the bytes for bits?": answer / 8,
        "a thousand times too much: check the power of ten": answer * 1e3,
        "a thousand times too little: check the power of ten": answer / 1e3,
    }


def _close(value: float, target: float, tolerance: float) -> bool:
    return abs(value - target) <= tolerance * abs(target)


def _number(value: float, unit: str) -> str:
    return f"{value:,.4g} {unit}".rstrip() if abs(value) < 1e4 else f"{value:,.0f} {unit}".rstrip()


def answer(letter: str | EllipsisType, quiz: Quiz) -> None:
    """Print whether a letter is the right answer, and why.

    For an unanswered quiz (`...`) the reasons are displayed folded, so a page that is only read has them.

    Raises: ValueError for a letter that is not offered.
    """
    letters = ", ".join(quiz.reasons)
    if letter is ...:
        asked = f"Put one of {letters} in quotes in place of the ... and run this cell again."
        reasons = [f"{each}) {_judged(each, quiz, 'No')}: {why}" for each, why in quiz.reasons.items()]
        _display_folded(asked, "The answer, and why not the others", reasons)
    elif not isinstance(letter, str) or letter.lower() not in quiz.reasons:
        raise ValueError(f"my_answer is {letter!r}: the letters offered are {letters}")
    else:
        print(f"{_judged(letter.lower(), quiz, 'Not quite')}: {quiz.reasons[letter.lower()]}")


def _judged(letter: str, quiz: Quiz, wrong: str) -> str:
    return "Right" if letter == quiz.right else wrong


def _display_folded(asked: str, summary: str, lines: Iterable[str]) -> None:
    """Show what to do, and below it the lines, which a click unfolds. Text alone has none of them."""
    folded = "".join(f"<p>{html.escape(line, quote=False)}</p>" for line in lines)
    page = f"<p>{asked}</p><details><summary>{summary}</summary>{folded}</details>"
    display({"text/plain": asked, "text/html": page}, raw=True)
