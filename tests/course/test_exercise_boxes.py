"""Promise: the box of every exercise shows difficulty, importance and minutes, on one scale."""

import re

import pytest
from support.lessons import EXERCISES, SOURCES, exercise_cells, source

BOX = re.compile(r"\*\*(?:[A-Z][a-z ]+\. )?Difficulty [1-5] of 5 · importance [1-5] of 5 · \d+ minutes\.\*\*")


def box_before(script: str, cell: str) -> str:
    """The last cell of prose before a code cell, where the exercise's box stands."""
    before = script[: script.index(cell)]
    return re.split(r"^# %% \[markdown\]\n", before, flags=re.MULTILINE)[-1]


def has_a_box(prose: str) -> bool:
    """Whether a quoted paragraph begins with all three, on the one scale."""
    return any(BOX.match(line.removeprefix("# > ")) for line in prose.splitlines() if line.startswith("# > "))


@pytest.mark.parametrize(("name", "place"), EXERCISES)
def test_every_exercise_has_its_box(name, place):
    assert has_a_box(box_before(source(name), exercise_cells(name)[place]))


@pytest.mark.parametrize(
    "line",
    [
        "**Difficulty 2 of 5 · 10 minutes.** Write it.",
        "**Difficulty 2 of 5 · important to all · 10 minutes.** Write it.",
        "**Importance 4 of 5 · 10 minutes.** Write it.",
        "**Difficulty 2 of 5 · importance 4 of 5.** Write it.",
        "**Difficulty 6 of 5 · importance 4 of 5 · 10 minutes.** Write it.",
    ],
)
def test_a_box_that_lacks_something_is_found(line):
    assert has_a_box("# > **Difficulty 2 of 5 · importance 4 of 5 · 10 minutes.** Write it.")
    assert not has_a_box(f"# > {line}") and not has_a_box("# Difficulty 2 of 5")


def test_each_exercise_has_one_box_and_no_other_prose_has():
    boxes = sum(len(BOX.findall(path.read_text("utf-8"))) for path in SOURCES.glob("[0-9][0-9]_*.py"))
    assert boxes == len(EXERCISES)


def test_targets_have_one_name():
    """Bronze, silver and gold are targets everywhere."""
    prose = "".join(path.read_text("utf-8") for path in SOURCES.glob("[0-9][0-9]_*.py"))
    assert not re.search(r"\bmedals?\b", prose, re.IGNORECASE) and "*targets*" in prose
