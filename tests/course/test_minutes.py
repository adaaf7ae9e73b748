"""Promise: the minutes in a lesson's box are those of its words, code, predictions, quiz and exercises."""

import re

import pytest
from support.lessons import NAMES, source

from zerolab.course.classroom import books

WORDS_PER_MINUTE = 170
LINES_PER_MINUTE = 15  # of code that is read and run
MINUTES_OF_A_PREDICTION = 1.5
MINUTES_OF_A_QUIZ = 4
MOST_DEVIATION = 0.2  # of the box: readers differ by more


def minutes_beside_exercises(source: str) -> float:
    """Estimate how long it takes to read and run a lesson, to predict, and to answer its quiz."""
    cells = re.split(r"^# %%", source, flags=re.MULTILINE)[1:]
    text = " ".join(cell for cell in cells if cell.startswith(" [markdown]"))
    code = [cell.split("\n", 1)[1] for cell in cells if not cell.startswith(" [markdown]")]
    lines = [line for cell in code for line in cell.splitlines() if line.strip()]
    calls = " ".join(code)
    return (
        len(text.split()) / WORDS_PER_MINUTE
        + len(lines) / LINES_PER_MINUTE
        + MINUTES_OF_A_PREDICTION * len(re.findall(r"\bpredict\(", calls))
        + MINUTES_OF_A_QUIZ * len(re.findall(r"\banswer\(", calls))
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_box_says_how_long_the_lesson_takes(name: str):
    box = re.search(r"\*\*(\d+) minutes(?:, and (\d+) more)?", source(name))
    stated = sum(int(minutes or 0) for minutes in box.groups())
    needed = minutes_beside_exercises(source(name)) + sum(books.lesson(name).minutes.values())
    assert needed == pytest.approx(stated, rel=MOST_DEVIATION)


def test_words_code_predictions_and_quizzes_count():
    lesson = f"# %% [markdown]\n# {'word ' * 196}\n# %%\n{'x = 1' + chr(10)}" * 3
    alone = minutes_beside_exercises(lesson)
    assert alone == pytest.approx(3 * (198 / 170 + 1 / 15))
    more = "# %%\npredict(1)\npredict(2)\nanswer(3)\n# %% [markdown]\n# two words"
    added = 2 * 1.5 + 4 + 3 / 15 + 4 / 170
    assert minutes_beside_exercises(lesson + more) == pytest.approx(alone + added)
