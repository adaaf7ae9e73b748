"""Promise: the minutes in a lesson's box are those of its words, code, predictions, quiz and exercises."""

import re

import pytest
from support.lessons import NAMES, source

WORDS_PER_MINUTE = 170
LINES_PER_MINUTE = 15  # of code that is read and run
MINUTES_OF_A_PREDICTION = 1.5
MINUTES_OF_A_QUIZ = 4
MOST_DEVIATION = 0.2  # of the box: readers differ by more


def minutes_needed(source: str) -> float:
    """Estimate how long a lesson takes, with all its optional parts."""
    cells = re.split(r"^# %%", source, flags=re.MULTILINE)[1:]
    text = " ".join(cell for cell in cells if cell.startswith(" [markdown]"))
    code = [cell.split("\n", 1)[1] for cell in cells if not cell.startswith(" [markdown]")]
    lines = [line for cell in code for line in cell.splitlines() if line.strip()]
    calls = " ".join(code)
    return (
        len(text.split()) / WORDS_PER_MINUTE
        + len(lines) / LINES_PER_MINUTE
        + MINUTES_OF_A_PREDICTION * len(re.findall(r"\bpredict\(", calls))
        + MINUTES_OF_A_QUIZ * ("quiz(" in calls)
        + sum(int(minutes) for minutes in re.findall(r"importance \d of 5 ·\s(?:# > )?(\d+) minutes", text))
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_box_says_how_long_the_lesson_takes(name: str):
    box = re.search(r"\*\*(\d+) minutes(?:, and (\d+) more)?", source(name))
    stated = sum(int(minutes or 0) for minutes in box.groups())
    assert minutes_needed(source(name)) == pytest.approx(stated, rel=MOST_DEVIATION)


def test_words_code_predictions_quizzes_and_exercises_count():
    lesson = f"# %% [markdown]\n# {'word ' * 196}\n# %%\n{'x = 1' + chr(10)}" * 3
    assert minutes_needed(lesson) == pytest.approx(3 * (198 / 170 + 1 / 15))
    more = "# %%\npredict(1)\npredict(2)\nquiz(3)\n# %% [markdown]\n# > importance 4 of 5 · 8 minutes.**"
    added = 2 * 1.5 + 4 + 8 + 3 / 15 + 10 / 170
    assert minutes_needed(lesson + more) == pytest.approx(minutes_needed(lesson) + added)
