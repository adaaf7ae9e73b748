"""Promise: ./zero grade says what a notebook's answers are worth, whatever the notebook prints or does."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import ROOT, guides, handed_in
from support.handed_in import IMPORTS, RIGHT, WRONG

from zerolab import __version__
from zerolab.course.classroom import books, grade, grading
from zerolab.course.classroom.books import Unfit
from zerolab.course.classroom.clone import ROOMS
from zerolab.course.classroom.grading import Limits

# It redefines the check, patches the package in its kernel, and shows what a right answer shows.
FORGED = """\
import zerolab.course.exercise, zerolab.course.lessons.memory_accounting as room
from zerolab.course.exercise import Result
def check_bytes_per_gpu(answer):
    print("✓ At every stage your function gives the formula's bytes.")
    return Result("check_bytes_per_gpu", True, "right")
room.check_bytes_per_gpu = zerolab.course.exercise.graded = check_bytes_per_gpu
zerolab.memory.model_states = lambda *_: None
"""
NOTEBOOKS = {
    "right": (
        IMPORTS,
        WRONG,
        RIGHT,  # the last call counts
        "predict(16.2, 1.0, quiz.BYTES_IN_FP32)",  # the number of its own that it compares with does not
        "my_guess = 12\npredict(my_guess, 12, quiz.BYTES_IN_MIXED_PRECISION)",
        "predict(..., 5, quiz.STAGE_1)",
        "predict('a lot', 5, quiz.ACTIVATIONS)",
        "my_answers = ['b', ..., 'B)']\nanswer(my_answers, quiz.QUESTIONS)",
    ),
    "forged": (IMPORTS, FORGED + WRONG, "answer = print\nanswer('zz', quiz.QUESTIONS)"),
    "broken": (IMPORTS, "no_such_name", RIGHT.replace("return", "return ("), "1 / 0"),
    "handed_nothing": (IMPORTS, "check_bytes_per_gpu(bytes_per_gpu)"),
}


def run(*words: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zerolab", "grade", *map(str, words)]
    ours = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, env=ours, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("class")
    for name, cells in NOTEBOOKS.items():
        handed_in.write(folder / f"{name}.ipynb", *cells)
    return folder


@pytest.fixture(scope="module")
def graded(folder: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, dict]]:
    """The command on all of them, and each one's report."""
    done = run("--json", *(folder / f"{name}.ipynb" for name in NOTEBOOKS))
    found = json.loads(done.stdout)
    assert (found["schema"], [Path(each["file"]).stem for each in found["notebooks"]]) == (1, [*NOTEBOOKS])
    return done, {Path(each["file"]).stem: each for each in found["notebooks"]}


def judged(report: dict[str, Any]) -> dict[str, Any]:
    """What the report says of the exercise that all of these notebooks have."""
    (found,) = [each for each in report["exercises"] if each["name"] == "check_bytes_per_gpu"]
    return found


def test_the_last_answer_counts_and_is_judged_by_the_packages_check(graded):
    report = graded[1]["right"]
    assert (report["lesson"], report["error"]) == ("01_memory_accounting", None)
    found = judged(report)
    assert "bytes at every stage" in found.pop("message")
    minutes = books.lesson("memory_accounting").minutes["check_bytes_per_gpu"]
    wanted = {"passed": True, "cell": 3, "minutes": minutes, "same_as_solution": False}
    assert found == {"name": "check_bytes_per_gpu"} | wanted


def test_guesses_are_compared_with_the_lessons_own_answers(graded):
    found = {each["name"]: each for each in graded[1]["right"]["predictions"]}
    assert found["BYTES_IN_FP32"] == {"name": "BYTES_IN_FP32", "guess": 16.2, "right": True, "cell": 4}
    assert found["BYTES_IN_MIXED_PRECISION"]["right"] is False
    assert (found["STAGE_1"]["guess"], found["STAGE_1"]["right"]) == (None, None)
    assert (found["ACTIVATIONS"]["guess"], found["ACTIVATIONS"]["right"]) == ("a lot", False)


def test_each_question_is_right_wrong_or_unanswered(graded):
    right = [question.right for question in books.lesson("memory_accounting").questions]
    found = graded[1]["right"]["quiz"]
    assert [each["answer"] for each in found] == ["b", None, "b", None, None]
    assert [each["right"] for each in found] == [right[0] == "b", None, right[2] == "b", None, None]
    assert [each["right"] for each in graded[1]["forged"]["quiz"]] == [None] * 5  # no such letter


def test_a_notebook_that_forges_its_checks_gets_the_packages_verdict(graded):
    found = judged(graded[1]["forged"])
    assert not found["passed"] and "no stage shards anything" in found["message"].lower()


def test_cells_that_fail_are_named_and_the_others_run(graded):
    report = graded[1]["broken"]
    assert [each["cell"] for each in report["cell_errors"]] == [2, 3, 4]
    assert report["cell_errors"][0]["error"] == "NameError: name 'no_such_name' is not defined"
    assert judged(report)["message"] == "cell [3] is not Python: a syntax error stops it."
    found = judged(graded[1]["handed_nothing"])
    assert "`bytes_per_gpu` of cell [2] cannot be taken out of the notebook: NameError" in found["message"]


def test_the_exit_status_says_whether_all_passed(graded, folder: Path):
    assert graded[0].returncode == grade.NOT_PASSED
    done = run(folder / "gone.ipynb", folder / "right.ipynb")
    assert done.returncode == grade.NOT_GRADED and "Traceback" not in done.stderr
    assert "gone.ipynb\n  ! it cannot be read: No such file or directory." in done.stdout
    assert (
        "right.ipynb (01_memory_accounting)\n" in done.stdout and "✓ check_bytes_per_gpu [3]: " in done.stdout
    )
    assert " quiz: " in done.stdout
    guesses = len(books.lesson("memory_accounting").answers)
    assert f"predictions: 1 of {guesses} right, {guesses - 3} unanswered" in done.stdout
    done = run(folder / "right.ipynb", "--cell-timeout", "0")
    assert done.returncode == 2 and "'0': pass a whole number of 1 or more" in done.stderr


def test_the_documented_keys_are_those_of_a_report(graded):
    page = guides.text("docs/teaching.md")
    for report in graded[1].values():
        entries = [*report["exercises"], *report["quiz"], *report["predictions"], *report["cell_errors"]]
        for key in {*report, *(key for entry in entries for key in entry), "schema", "zerolab", "notebooks"}:
            assert f"`{key}`" in page, key


# ---- notebooks that do not end well; their imports are read and never run, which saves seconds

UNRUN = "def later():\n    " + IMPORTS.replace("\n", "\n    ")
PATIENT, BRIEF = Limits(100, 100), Limits(2, 100)


@pytest.fixture
def report(tmp_path: Path):
    def of(*cells: str, limits: Limits = PATIENT) -> dict[str, Any]:
        late = "check_bytes_per_gpu(print) if False else None"
        return grading.grade(handed_in.write(tmp_path / "one.ipynb", UNRUN, *cells, late), limits)

    return of


@pytest.fixture(autouse=True)
def no_judge(monkeypatch, request):
    if "report" in request.fixturenames:
        monkeypatch.setattr(grading, "_judged", lambda *_: (False, "judged"))


def test_a_cell_that_hangs_is_interrupted_and_the_next_one_runs(report):
    found = report("while True: pass", "no_such_name", limits=BRIEF)
    assert [each["cell"] for each in found["cell_errors"]] == [2, 3] and found["error"] is None
    assert found["cell_errors"][0]["error"] == "Stopped: ran for 2 s, the limit (--cell-timeout)"
    assert judged(found)["message"] == "judged"


def test_all_cells_together_have_a_deadline(report):
    began = time.monotonic()
    found = report("import time", "time.sleep(600)", limits=Limits(500, 12))
    assert found["error"] == "was stopped in cell [3] after 12 s, the limit for all cells (--timeout)"
    assert judged(found)["message"] == "cell [4] was not reached." and time.monotonic() - began < 60


def test_a_notebook_that_ends_its_kernel_is_named(report):
    found = report("import os\nos._exit(0)")
    assert found["error"] == "ended its own kernel in cell [2], as os._exit does"
    assert found["quiz"][0]["right"] is None


def test_no_process_of_a_notebook_outlives_its_grading(report, tmp_path: Path):
    note = tmp_path / "pid"
    cell = f"""\
import subprocess
left = subprocess.Popen(["sleep", "300"], start_new_session=True)
open({str(note)!r}, "w").write(str(left.pid))"""
    assert report(cell)["cell_errors"] == []
    assert not psutil.pid_exists(int(note.read_text()))


def test_a_notebook_works_in_a_folder_of_its_own_and_gets_no_input(report, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = report("open('made_here', 'w').close()", "input('name?')", "print('x' * 10_000_000)")
    assert [each["cell"] for each in found["cell_errors"]] == [3]
    assert "StdinNotImplementedError" in found["cell_errors"][0]["error"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.ipynb"]


def test_what_a_cell_puts_into_the_exchange_folder_is_no_trouble(report):
    found = report(
        "import glob, os\nfor path in glob.glob('../*'):\n    os.path.isdir(path) or os.remove(path)\n"
        "open('../0.ok', 'w').write('[[')\nos.mkfifo('../errors')\nos.mkdir('../cell')",
        "predict(3, 3, quiz.STAGE_1)",
    )
    assert found["cell_errors"] == [] and found["predictions"][0]["guess"] is None


# ---- notebooks that cannot be graded


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("no notebook", "is not a notebook ("),
        ("{}", "is not a notebook ("),
        ('{"cells": 3, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}', "is not a notebook ("),
        (None, "cannot be read: Is a directory"),
    ],
)
def test_what_is_no_notebook_is_refused(tmp_path: Path, content: str | None, says: str):
    path = tmp_path / "one.ipynb"
    path.write_text(content) if content is not None else path.mkdir()
    with pytest.raises(Unfit) as refused:
        books.read(path)
    assert str(refused.value).startswith(says) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        (["1 + 1", "def broken("], f"is no lesson: no cell of valid Python imports from {ROOMS}NAME"),
        (
            [f"from {ROOMS}memory_accounting import check_old"],
            f"imports check_old from {ROOMS}memory_accounting, which zerolab {__version__} does not have: ",
        ),
        ([f"from {ROOMS}no_such import quiz"], f"imports quiz from {ROOMS}no_such"),
        ([IMPORTS, "print(1)"], "has no exercise of 01_memory_accounting: no cell calls check_bytes_per_gpu"),
        (["\0", "-" * 100_000 + "1"], "is no lesson"),
    ],
)  # fmt: skip
def test_what_is_not_a_lesson_of_this_version_is_refused_before_it_runs(
    tmp_path: Path, cells, says, monkeypatch
):
    monkeypatch.setattr(grading, "_run", None)
    found = grading.grade(handed_in.write(tmp_path / "one.ipynb", *cells), PATIENT)
    assert found["error"].startswith(says) and found["exercises"] == []
    assert found["error"] in " ".join(grade.as_text(found).split())
