"""Predict a number before you run it, and learn which mistake a wrong number comes from."""

import html
from collections.abc import Mapping
from types import EllipsisType

from IPython.display import display

from zerolab.course.questions import QUIZZES

# A size in bytes can be confused with its binary namesake, which is 1024/1000 larger once, twice or more.
_BYTE_UNITS = {"KB": ("KiB", 1), "MB": ("MiB", 2), "GB": ("GiB", 3), "TB": ("TiB", 4)}


def predict(
    guess: float | EllipsisType,
    answer: float,
    unit: str = "",
    mistakes: Mapping[str, float] | None = None,
    tolerance: float = 0.02,
) -> None:
    """Say how far a guess is from the answer, and when it is a known wrong number, which mistake makes it.

    `mistakes` maps a sentence about the mistake to the number it leads to. A slip with units (GiB for GB,
    bits for bytes, a power of ten) is recognised without being listed. An unanswered guess (`...`) shows
    the answer and the known wrong numbers, so a page that is only read says as much as one that is run.

    Raises: TypeError for a guess that is not a number.
    """
    mistakes = dict(mistakes or {})
    if guess is ...:
        print(
            "No guess yet: put a number in place of the ... and run this again. Answer: "
            f"{_number(answer, unit)}."
        )
        for sentence, value in mistakes.items():
            print(f"  {_number(value, unit)} would mean: {sentence}.")
        return
    if isinstance(guess, bool) or not isinstance(guess, (int, float)):
        raise TypeError(
            f"my_guess is {guess!r}: write a plain number{f' of {unit}' if unit else ''}, such as 12.5"
        )
    print(_verdict(guess, answer, unit, mistakes, tolerance))


def _verdict(guess: float, answer: float, unit: str, mistakes: Mapping[str, float], tolerance: float) -> str:
    if _close(guess, answer, tolerance):
        return f"Right: {_number(answer, unit)}."
    said = f"You said {_number(guess, unit)}; it is {_number(answer, unit)}"
    for sentence, value in (mistakes | _unit_slips(answer, unit)).items():
        if _close(guess, value, tolerance):
            return f"{said}. A known mistake: {sentence}."
    if answer == 0 or guess == 0 or (guess < 0) != (answer < 0):
        return f"{said}."
    factor = guess / answer
    return (
        f"{said}: {f'{factor:.2g} times too much' if factor > 1 else f'{1 / factor:.2g} times too little'}."
    )


def _unit_slips(answer: float, unit: str) -> dict[str, float]:
    if unit not in _BYTE_UNITS:
        return {}
    binary, power = _BYTE_UNITS[unit]
    units = f"1 {unit} is 10^{3 * power} bytes, 1 {binary} is 2^{10 * power}"
    return {
        f"that is the size in {binary} ({units})": answer / 1.024**power,
        f"you multiplied by 1024s where you should divide ({units})": answer * 1.024**power,
        "that is bits, and a byte has eight of them": answer * 8,
        "that is one eighth: were the bytes taken for bits?": answer / 8,
        "a thousand times too much: check the power of ten": answer * 1e3,
        "a thousand times too little: check the power of ten": answer / 1e3,
    }


def _close(value: float, target: float, tolerance: float) -> bool:
    return abs(value - target) <= tolerance * abs(target)


def _number(value: float, unit: str) -> str:
    return f"{value:,.4g} {unit}".rstrip() if abs(value) < 1e4 else f"{value:,.0f} {unit}".rstrip()


def quiz(name: str, answer: str | EllipsisType) -> None:
    """Say whether a lettered answer is right, and why.

    Unanswered (`...`), it asks for a letter and keeps the reasons folded away, where a page that is only read
    has them, too.

    Raises: ValueError for a letter that is not offered, or a quiz that there isn't.
    """
    if name not in QUIZZES:
        raise ValueError(f"there is no quiz {name!r}; there are {', '.join(QUIZZES)}")
    right, because = QUIZZES[name]
    letters = ", ".join(because)
    if answer is ...:
        asked = f"Put one of {letters} in quotes in place of the ... and run this cell again."
        display({"text/plain": asked, "text/html": f"<p>{asked}</p>{_folded(right, because)}"}, raw=True)
        return
    if not isinstance(answer, str) or answer.lower() not in because:
        raise ValueError(f"my_answer is {answer!r}: the letters offered are {letters}")
    letter = answer.lower()
    print(f"{'Right' if letter == right else 'Not quite'}: {because[letter]}")


def _folded(right: str, because: Mapping[str, str]) -> str:
    reasons = (
        f"<p><b>{letter})</b> {'Right' if letter == right else 'No'}: {html.escape(reason, quote=False)}</p>"
        for letter, reason in because.items()
    )
    return f"<details><summary>The answer, and why not the others</summary>{''.join(reasons)}</details>"
