"""Promise: a handout holds no output and no answer, and everything that is graded is still in it."""

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from support import ROOT
from support.lessons import NAMES, exercise

from zerolab.__main__ import main
from zerolab.course.classroom import books, clone, handout
from zerolab.course.questions import in_html


def committed(name: str):
    return nbformat.read(clone.lesson_paths()[name], as_version=4)


@pytest.fixture(params=NAMES)
def name(request) -> str:
    return request.param


def test_no_output_and_no_answer_is_left(name: str):
    """The committed notebook has each of them, so that this can fail."""
    before, book = committed(name), handout.handout(committed(name))
    text, shown = nbformat.writes(book), nbformat.writes(before)
    reasons = [choice.why for quiz in books.lesson(name).questions for choice in quiz.choices.values()]
    for reason in reasons:
        said = in_html(reason).replace('"', '\\"')
        assert said in shown and said not in text and reason not in text
    assert "The answer</summary>" in shown
    assert not re.search(r"<summary>(The )?[Aa]nswers?\b", text) and "widgets" not in book.metadata
    assert all(not c.outputs and c.execution_count is None for c in books.code_cells(book))
    for call in books.asked(book, ()):
        assert call.given in ("my_guess", "my_answers")
    assert text.count("my_guess = ...") == sum("my_guess = " in cell.source for cell in book.cells)


def test_the_code_is_the_committed_one_and_as_much_is_asked(name: str):
    """nbval runs the committed cells, so those of the handout run."""
    before, book = committed(name), handout.handout(committed(name))
    assert [cell.source for cell in books.code_cells(book)] == [c.source for c in books.code_cells(before)]
    nbformat.validate(book)
    assert books.lesson_of(book) == name
    asked = [[call[:4] for call in books.asked(each, clone.checks(name))] for each in (before, book)]
    assert asked[0] == asked[1] and len(asked[0]) > 2


def test_links_lead_out_of_the_folder_and_no_badge_opens_the_committed_notebook(name: str):
    text = nbformat.writes(handout.handout(committed(name)))
    assert "](../" not in text and "badge" not in text
    assert "](../" not in nbformat.writes(committed(name)) or "/blob/main/docs/" in text


def test_only_folded_answers_are_cut_out_of_the_prose():
    cell = nbformat.v4.new_markdown_cell(
        "Above.\n\n<details><summary>Answers</summary>\n\n38.5 GB\n</details>\n\nBelow.\n"
        "<details><summary>A longer proof</summary>\n\nIt is so.\n</details>"
    )
    only = nbformat.v4.new_markdown_cell("<details><summary>Answer</summary>\n\n4.\n</details>")
    book = handout.handout(nbformat.v4.new_notebook(cells=[cell, only]))
    assert [c.source.split("\n")[:3] for c in book.cells] == [["Above.", "", "Below."]]
    assert "It is so." in book.cells[0].source


# ---- the command


def test_the_command_writes_every_lesson_once(tmp_path: Path, capsys):
    folder = tmp_path / "class/handout"
    assert main(["handout", str(folder)]) == 0
    written = sorted(path.name for path in folder.iterdir())
    assert written == sorted(path.name for path in clone.lesson_paths().values())
    assert capsys.readouterr().out.count("wrote ") == len(written)
    (folder / "00_ranks.ipynb").write_text("a student's work")
    assert main(["handout", str(folder), "00_ranks"]) == 2
    assert "is not empty: name a new folder, or pass --force" in capsys.readouterr().err
    assert (folder / "00_ranks.ipynb").read_text() == "a student's work"
    (folder / "01_memory_accounting.ipynb").write_text("not asked for")
    assert main(["handout", str(folder), "00_ranks", "--force"]) == 0
    assert books.lesson_of(books.read(folder / "00_ranks.ipynb")) == "ranks"
    assert (folder / "01_memory_accounting.ipynb").read_text() == "not asked for"


def test_a_lesson_that_is_not_there_is_refused(tmp_path: Path, capsys):
    with pytest.raises(SystemExit):
        main(["handout", str(tmp_path / "new"), "ranks"])
    assert "'ranks' is not a lesson; there are 00_ranks, " in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_folder_is_asked_for_alone(capsys):
    with pytest.raises(SystemExit):
        main(["handout"])
    assert "the following arguments are required: FOLDER (" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch, capsys):
    def refuse(self: Path, **_: bool) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert main(["handout", str(tmp_path / "new")]) == 2
    assert "new cannot be made: No space left on device. Name another" in capsys.readouterr().err


def test_without_a_clone_the_error_names_it(monkeypatch, tmp_path: Path, capsys):
    monkeypatch.setattr(clone, "NOTEBOOKS", tmp_path / "notebooks")
    assert main(["handout", str(tmp_path / "new")]) == 2
    assert "holds no lesson: clone the repository" in capsys.readouterr().err


# ---- nbgrader


def test_the_tests_of_nbgrader_are_sound_cells(name: str):
    """The keys are those of its format 3; nbgrader itself is asked below, where it is installed."""
    book = handout.graded(handout.handout(committed(name)), name)
    nbformat.validate(book)
    tests = [cell for cell in book.cells if "nbgrader" in cell.metadata]
    ours = books.lesson(name)
    marks = [dict(cell.metadata["nbgrader"]) for cell in tests]
    points = [*(minutes or 10 for minutes in ours.minutes.values()), len(ours.questions)]
    assert [mark.pop("points") for mark in marks] == points
    fixed = {"grade": True, "solution": False, "locked": True, "task": False}
    fixed |= {"schema_version": 3, "cell_type": "code"}
    for cell, mark, identity in zip(tests, marks, [*ours.minutes, f"{name}_quiz"], strict=True):
        assert mark == fixed | {"grade_id": identity}
        compile(cell.source, "test", "exec")
        above = book.cells[book.cells.index(cell) - 1].source
        assert identity in above or "quiz.QUESTIONS" in above


def test_nbgraders_cells_fail_where_the_check_does_and_count_right_letters():
    book = handout.graded(handout.handout(committed("memory_accounting")), "memory_accounting")
    tests = [cell.source for cell in book.cells if "nbgrader" in cell.metadata]
    stub, _, solution = exercise("memory_accounting")
    exec(f"{solution}\n{tests[0]}", {"__name__": "__main__"})
    with pytest.raises(AssertionError):
        exec(f"{stub}\n{tests[0]}", {"__name__": "__main__"})
    right = " ".join(quiz.right for quiz in books.lesson("memory_accounting").questions)
    for letters, points in (("...", 0), (repr(right), 5), (repr(right[:3]), 2)):
        names = {"__name__": "__main__"}
        exec(f"my_answers = {letters}\n{tests[-1].replace('number_right(', 'points = number_right(')}", names)
        assert names["points"] == points


@pytest.mark.skipif(not shutil.which("nbgrader"), reason="nbgrader is not installed")
@pytest.mark.timeout(900)
def test_nbgrader_takes_the_handout_and_grades_with_it(tmp_path: Path):
    """A solved notebook whose locked cell was changed, and one that redefines the check."""

    def nbgrader(*words: str) -> None:
        place = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        done = subprocess.run(
            ["nbgrader", *words],
            cwd=tmp_path,
            env=os.environ | place,
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, done.stderr

    (tmp_path / "nbgrader_config.py").write_text("c = get_config()\nc.CourseDirectory.course_id = 'zero'\n")
    assert main(["handout", str(tmp_path / "source/ps1"), "01_memory_accounting", "--nbgrader"]) == 0
    nbgrader("generate_assignment", "ps1")
    stub, _, solution = exercise("memory_accounting")
    for student in ("ada", "bob"):
        book = nbformat.read(tmp_path / "release/ps1/01_memory_accounting.ipynb", as_version=4)
        for cell in book.cells:
            if "nbgrader" in cell.metadata:
                cell.source = "100"
            new = solution if student == "ada" else f"{stub}\ndef check_bytes_per_gpu(_): return True"
            cell.source = cell.source.replace(stub.rstrip(), new)
        (tmp_path / f"submitted/{student}/ps1").mkdir(parents=True)
        nbformat.write(book, tmp_path / f"submitted/{student}/ps1/01_memory_accounting.ipynb")
    nbgrader("autograde", "ps1")
    nbgrader("export")
    rows = [line.split(",") for line in (tmp_path / "grades.csv").read_text().splitlines()[1:]]
    minutes = books.lesson("memory_accounting").minutes["check_bytes_per_gpu"]
    assert {row[3]: float(row[-2]) for row in rows} == {"ada": minutes, "bob": 0}
