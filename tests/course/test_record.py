"""Promise: what a reader has done is kept on this machine alone, and never gets in a lesson's way."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import build
import ipywidgets
import nbformat
import pytest
from support import ROOT
from support.lessons import NAMES, source

from zerolab.__main__ import main
from zerolab.course import answer, my_progress, predict, quizzes
from zerolab.course.classroom import clone, record
from zerolab.course.classroom.record import Entry, read, remember
from zerolab.course.exercise import graded
from zerolab.course.lessons.ranks import quiz

RANKS = "zerolab.course.lessons.ranks.check"


@pytest.fixture
def path(tmp_path: Path, monkeypatch) -> Path:
    """The file of a reader."""
    monkeypatch.setenv("ZEROLAB_PROGRESS", str(tmp_path / "state/progress.jsonl"))
    return tmp_path / "state/progress.jsonl"


@pytest.fixture
def in_lesson(monkeypatch, path: Path) -> Path:
    """The same, in a notebook that imported the quiz of lesson 00."""
    monkeypatch.setattr(sys.modules["__main__"], "quiz", quiz, raising=False)
    return path


# ---- what is recorded


def test_a_check_a_quiz_and_a_guess_are_recorded(in_lesson: Path, monkeypatch):
    def check_average(answer):
        return None if answer() else "no"

    check_average.__module__ = RANKS
    check = graded("Yes.")(check_average)
    check(lambda: False)
    assert read(in_lesson) == {Entry("ranks", "exercise", "check_average"): False}
    check(lambda: True)
    right = quiz.QUESTIONS[1].right
    answer([..., right], quiz.QUESTIONS)
    predict(-1.0, 5.0, quiz.RELAYED)
    assert read(in_lesson) == {
        Entry("ranks", "exercise", "check_average"): True,
        Entry("ranks", "quiz", "2"): True,
        Entry("ranks", "prediction", "RELAYED"): False,
    }


def test_a_click_is_recorded(in_lesson: Path):
    layout = ipywidgets.Layout()
    looks = quizzes._Looks(layout, ipywidgets.HTML().style, ipywidgets.ButtonStyle())
    _, *buttons, _ = quizzes._panel(3, quiz.QUESTIONS[2], looks).children
    assert not in_lesson.exists(), "showing a quiz records nothing"
    list(buttons)[list(quiz.QUESTIONS[2].choices).index(quiz.QUESTIONS[2].right)].click()
    assert read(in_lesson) == {Entry("ranks", "quiz", "3"): True}


def test_what_belongs_to_no_lesson_is_not_recorded(path: Path):
    """Such as the quizzes and checks of tests, and those of a notebook of the reader's own."""
    for of in (None, "a.module", RANKS.removeprefix("zerolab."), os):
        remember(of, "quiz", "1", True)
    answer(quiz.QUESTIONS[0].right, quiz.QUESTIONS)
    assert not path.exists()


def test_a_line_is_written_when_something_is_new_and_right_stays_right(path: Path):
    for right in (False, False, True, False, True):
        remember(RANKS, "quiz", "1", right)
    lines = [json.loads(line) for line in path.read_text().splitlines() if line]
    assert lines == [["ranks", "quiz", "1", False], ["ranks", "quiz", "1", True]]
    assert read(path) == {Entry("ranks", "quiz", "1"): True}
    assert path.stat().st_mode & 0o077 == 0, "others can read it"
    with path.open("a") as file:  # as another kernel does that has not read the last line
        file.write('\n["ranks", "quiz", "1", false]')
    assert read(path) == {Entry("ranks", "quiz", "1"): True}


def test_the_file_is_in_the_folder_for_state(monkeypatch, tmp_path: Path):
    monkeypatch.delenv("ZEROLAB_PROGRESS")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert record.place() == tmp_path / "zerolab/progress.jsonl"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert record.place() == tmp_path / ".local/state/zerolab/progress.jsonl"


# ---- nothing gets in the way


@pytest.mark.parametrize(
    "break_it",
    [
        lambda path: path.parent.write_text("a file where the folder should be"),
        lambda path: path.mkdir(parents=True),
        lambda path: (path.parent.mkdir(), os.mkfifo(path)),
        lambda path: (path.parent.mkdir(), path.symlink_to("/dev/full")),
        lambda path: (path.parent.mkdir(), path.symlink_to(path)),
    ],
    ids=["no folder", "folder", "pipe", "full disk", "circle"],
)
def test_a_place_that_cannot_be_written_is_no_error(path: Path, break_it):
    break_it(path)
    remember(RANKS, "quiz", "1", True)
    assert "00_ranks" in str(my_progress())


def test_a_read_only_folder_is_no_error(path: Path, monkeypatch):
    """As root may write everywhere, the system's refusal is played."""

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(record.os, "open", refuse)
    remember(RANKS, "quiz", "1", True)
    assert not path.exists()


def test_lines_that_nobody_can_read_are_left_out_and_the_next_one_is_kept(path: Path):
    path.parent.mkdir()
    path.write_bytes(
        b'\xff\xfe\n[1, 2]\n"abcd"\n{}\nnull\n["ranks", "quiz", "2", 1]\n["ranks", "quiz", "3", false]\n'
        + b"[" * 9999
        + b'\n["ra'
    )
    remember(RANKS, "quiz", "1", True)
    assert read(path) == {Entry("ranks", "quiz", "3"): False, Entry("ranks", "quiz", "1"): True}
    assert "1 of 5" in str(my_progress())


def add(worker: int) -> None:
    for number in range(50):
        remember(RANKS, "exercise", f"{worker} {number}", True)


def test_kernels_that_write_at_the_same_time_lose_nothing(path: Path):
    with ProcessPoolExecutor(4) as workers:
        list(workers.map(add, range(4)))
    assert len(read(path)) == 200


def test_nothing_is_written_where_it_is_off(path: Path, monkeypatch, tmp_path: Path, capsys):
    monkeypatch.setenv("ZEROLAB_PROGRESS", "off")
    monkeypatch.setenv("HOME", str(tmp_path))
    remember(RANKS, "quiz", "1", True)
    assert list(tmp_path.iterdir()) == [] and "ZEROLAB_PROGRESS is off" in str(my_progress())
    assert main(["progress", "--reset"]) == 2 and "unset it" in capsys.readouterr().err


def test_tests_and_builds_of_notebooks_leave_the_record_alone(tmp_path: Path, monkeypatch):
    """nbval reads the conftest.py beside the notebooks."""
    assert os.environ["ZEROLAB_PROGRESS"] == "off"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "--nbval", "notebooks/00_ranks.ipynb", "-p",
         "no:cacheprovider", "--debug", f"{tmp_path / 'log'}"],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0 and f"{ROOT}/notebooks/conftest.py" in (tmp_path / "log").read_text()
    monkeypatch.delenv("ZEROLAB_PROGRESS")
    cell = nbformat.v4.new_code_cell("import os\nprint(os.environ['ZEROLAB_PROGRESS'])")
    built = build.execute(nbformat.v4.new_notebook(cells=[cell]), "sample")
    assert built.cells[0].outputs[0].text == "off\n"


def test_what_a_lesson_prints_does_not_depend_on_the_record(in_lesson: Path, capsys):
    said = []
    for _ in range(2):
        predict(1.0, 5.0, quiz.RELAYED)
        answer("a", quiz.QUESTIONS)
        said.append(capsys.readouterr().out)
    assert in_lesson.exists() and said[0] == said[1]


# ---- the page


def test_my_progress_is_a_table_in_text_and_in_html(in_lesson: Path):
    remember(RANKS, "exercise", "check_average", True)
    for number, right in (("1", True), ("2", False), ("4", True), ("77", True)):
        remember(RANKS, "quiz", number, right)
    remember(RANKS, "prediction", "RELAYED", True)
    remember(RANKS, "prediction", "other", False)
    remember("zerolab.course.lessons.gone.check", "quiz", "1", True)
    page = my_progress()
    text = repr(page).splitlines()
    (row,) = [line for line in text if line.startswith("00_ranks ")]
    assert row.split("  ")[-1].strip() == "1 of 3" and "  2 of 5  " in row
    assert "gone" not in repr(page) and text[-1] == f"This is kept in {in_lesson}, and sent nowhere."
    table = ElementTree.fromstring(page._repr_html_())
    assert table.find("caption").text.startswith("My progress. ")
    assert [head.get("scope") for head in table.find("thead").iter("th")] == ["col"] * 4
    rows = table.find("tbody").findall("tr")
    assert [row.find("th").get("scope") for row in rows] == ["row"] * len(rows)
    assert [cell.text for cell in rows[0]][-2:] == ["2 of 5", "1 of 3"]
    assert "style" not in page._repr_html_() and "color" not in page._repr_html_(), (
        "the theme has the colours"
    )


def test_the_command_progress_prints_the_page_and_resets_it(path: Path, capsys):
    remember(RANKS, "quiz", "1", True)
    assert main(["progress"]) == 0
    assert "1 of 5" in capsys.readouterr().out
    assert main(["progress", "--reset"]) == 0 and not path.exists()
    assert capsys.readouterr().out == f"removed {path}\n"
    assert main(["progress"]) == 0 and "1 of 5" not in capsys.readouterr().out
    path.mkdir()
    assert main(["progress"]) == 0
    assert "cannot be read (it is not a file): set ZEROLAB_PROGRESS to a file." in capsys.readouterr().out
    assert main(["progress", "--reset"]) == 2 and "cannot be removed: " in capsys.readouterr().err


def test_the_page_needs_no_clone(path: Path, monkeypatch, tmp_path: Path):
    monkeypatch.setattr("zerolab.course.classroom.clone.NOTEBOOKS", tmp_path / "none")
    assert "\nranks " in repr(my_progress())


def test_guesses_are_counted_before_a_lesson_is_opened():
    """As many as its notebook asks for."""
    for name in NAMES:
        asked = len(re.findall(r"^predict\(", source(name), re.MULTILINE))
        assert clone.predictions(name) == asked > 0, name
