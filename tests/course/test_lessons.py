"""Promise: a lesson's room, source, notebook and README row agree in name, and a new lesson needs no list."""

import contextlib
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from support import ROOT
from support.lessons import EXERCISES, NAMES, exercise, notebook_names, source

from zerolab.course.questions import Prediction


def places(root: Path) -> dict[str, set[str]]:
    """The names of the lessons, without their numbers, in each place where a lesson is."""
    readme = (root / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| \[(\w+)\]\(notebooks/(\w+)\.ipynb\) \|", readme, re.MULTILINE)
    numbered = {
        "source": {path.stem for path in (root / "notebooks/source").glob("*.py")},
        "notebook": {path.stem for path in (root / "notebooks").glob("*.ipynb")},
        "README row": {name for name, file in rows if name == file},
    }
    rooms = (root / "zerolab/course/lessons").glob("*/__init__.py")
    return {"room": {room.parent.name for room in rooms}} | {
        place: {re.sub(r"^\d\d_", "", name) for name in names} for place, names in numbered.items()
    }


def missing(root: Path) -> list[str]:
    found = places(root)
    everything = set().union(*found.values())
    return [
        f"{name} has no {place}" for name in sorted(everything) for place in found if name not in found[place]
    ]


def test_every_lesson_has_a_room_a_source_a_notebook_and_a_row():
    assert missing(ROOT) == [] and NAMES == sorted(places(ROOT)["room"]) != []


def test_the_minutes_in_the_readme_are_those_of_the_first_box():
    readme = (ROOT / "README.md").read_text("utf-8")
    for name in NAMES:
        row = rf"^\| \[\d\d_{name}\]\([^)]*\) \| (\d+)(?: \+ (\d+))? \|"
        box = r"\*\*(\d+) minutes(?:, and (\d+) more)?"
        (in_readme,) = re.findall(row, readme, re.MULTILINE)
        assert re.search(box, source(name)).groups("") == in_readme, name


def test_every_lesson_has_an_exercise():
    assert {name for name, _ in EXERCISES} == set(NAMES)


@pytest.mark.parametrize("name, place", EXERCISES)
def test_a_stub_is_told_that_it_is_one_and_the_solution_passes(name, place):
    stub, call, solution = exercise(name, place)
    names = notebook_names(name)
    for code, says in ((stub, "✗ Not written yet"), (solution, "✓")):
        exec(code, names)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            result = eval(call, names)
        assert printed.getvalue().startswith(says) and bool(result) == (says == "✓")


@pytest.mark.parametrize("name, place", EXERCISES)
def test_an_exercise_has_three_hints_and_shows_no_solution_before_it_is_asked_for(name, place, capsys):
    _, call, solution = exercise(name, place)
    check = notebook_names(name)[call.partition("(")[0]]
    for number in (1, 2, 3):
        check.hint(number)
        assert capsys.readouterr().out.startswith(f"Hint {number} of 3: ")
    with pytest.raises(ValueError, match=r"no hint 4: .* has 1 to 3"):
        check.hint(4)
    with pytest.raises(ValueError, match=r"no hint 1\.0: "):
        check.hint(1.0)
    check.solution()
    assert capsys.readouterr().out == solution + "\n"
    assert "A solution</summary>" not in source(name) and f"{check.__name__}.solution()" in source(name)


@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_quiz_file_holds_is_asked_once(name):
    room = vars(importlib.import_module(f"zerolab.course.lessons.{name}.quiz"))
    own = {key for key, value in room.items() if isinstance(value, Prediction) or key == "QUESTIONS"}
    own |= {key for key, value in room.items() if getattr(value, "__module__", "") == room["__name__"]}
    asked = re.findall(r"\bquiz\.(\w+)", source(name))
    answers = {key for key in asked if isinstance(room[key], (int, float))}
    assert sorted(asked) == sorted(own | answers)


def test_a_check_needs_no_front_end():
    """Checks are imported in worker processes, which start slowly enough without IPython and widgets."""
    rooms = ", ".join(f"zerolab.course.lessons.{name}" for name in NAMES)
    said = python(
        ROOT,
        "-c",
        f"import sys, {rooms}; print({{'IPython', 'ipywidgets', 'matplotlib'}} & set(sys.modules))",
    )
    assert said == "set()\n"


# ---- a new lesson: one folder, one source, one row

ROOM = {
    "__init__.py": '''
        """Lesson 99: two and two."""

        from zerolab.course.lessons.two_and_two.check import check_sum

        __all__ = ["check_sum"]
    ''',
    "check.py": '''
        """Lesson 99's exercise."""

        from zerolab.course.exercise import graded


        def add(one, other):
            return one + other


        HINTS = ("return something", "return a sum", "return one + other")


        @graded("Your sum is right.", call="add(one, other)", hints=HINTS, solution=[add])
        def check_sum(fn):
            """Call fn(2, 2)."""
            got = fn(2, 2)
            return "not written yet" if got is None else None if got == 4 else f"{got} is not the sum"
    ''',
    "figures.py": '''
        """Lesson 99's drawing."""


        def four(fig):
            """Four boxes."""
            fig.subplots().bar(range(4), 1)
            return "Four boxes."
    ''',
    "quiz.py": '''
        """Lesson 99's prediction."""

        from zerolab.course.questions import Prediction

        SUM = Prediction({"they were multiplied and halved": 2})
    ''',
}
SOURCE = """\
    # %% [markdown]
    # # 99 · Two and two
    #
    # > **5 minutes.** *You need:* numbers. *Afterwards you can* add. *Paper:* none.

    # %%
    from zerolab.course import figure, predict, show
    from zerolab.course.lessons.two_and_two import check_sum, figures, quiz

    # %%
    my_guess = ...

    # %%
    predict(my_guess, 2 + 2, quiz.SUM)
    fig = figure(height=1)
    show(fig, figures.four(fig))


    # %%
    # Exercise
    def add(one, other): ...


    check_sum(add)

    # %% [markdown]
    # Stuck? `check_sum.hint(1)` prints a hint, and `check_sum.solution()` prints a solution.
"""
ROW = "| [99_two_and_two](notebooks/99_two_and_two.ipynb) | 5 | add |\n"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of what the course consists of, with one more lesson that has no notebook yet."""
    leave_out = shutil.ignore_patterns("__pycache__", "*.ipynb_checkpoints")
    for folder in ("zerolab", "notebooks", "tests", "tools", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=leave_out)
    for file in ("README.md", "CONTRIBUTING.md", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    for file, text in ROOM.items():
        room = tmp_path / "zerolab/course/lessons/two_and_two"
        room.mkdir(exist_ok=True)
        (room / file).write_text(re.sub(r"^ {8}", "", text.lstrip("\n"), flags=re.MULTILINE).rstrip() + "\n")
    source_file = tmp_path / "notebooks/source/99_two_and_two.py"
    source_file.write_text(re.sub(r"^ {4}", "", SOURCE, flags=re.MULTILINE))
    readme = (tmp_path / "README.md").read_text("utf-8")
    last_row = re.findall(r"^\| \[\d\d_\w+\]\(notebooks/.*\n", readme, re.MULTILINE)[-1]
    (tmp_path / "README.md").write_text(readme.replace(last_row, last_row + ROW), "utf-8")
    return tmp_path


def python(clone: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=clone,
        env=os.environ | {"PYTHONPATH": str(clone)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_new_lesson_is_found_by_the_builder_and_by_the_tests(clone: Path):
    assert missing(clone) == ["two_and_two has no notebook"]
    assert "built notebooks/99_two_and_two.ipynb" in python(clone, "notebooks/build.py", "99_two_and_two")
    assert missing(clone) == []
    book = nbformat.read(clone / "notebooks/99_two_and_two.ipynb", as_version=4)
    assert "✗ Not written yet" in str(book.cells[-2].outputs)
    files = ("test_lessons.py", "test_notebooks.py")
    pytest_words = ("-m", "pytest", "-p", "no:cacheprovider", "-rA", "-k", "two_and_two")
    said = python(clone, *pytest_words, *(f"tests/course/{file}" for file in files))
    passed = re.findall(r"^PASSED .*/test_(\w+)\.py::\w+\[(?:99_)?two_and_two(?:-0)?\]", said, re.M)
    assert passed.count("lessons") == 3 and passed.count("notebooks") >= 5


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("zerolab/course/lessons/two_and_two", "two_and_two has no room"),
        ("notebooks/source/99_two_and_two.py", "two_and_two has no source"),
        ("README.md", "two_and_two has no README row"),
    ],
)
def test_a_place_that_is_missing_is_named(clone: Path, path: str, says: str):
    if path.endswith(".md"):
        (clone / path).write_text((clone / path).read_text("utf-8").replace(ROW, ""), "utf-8")
    elif path.endswith(".py"):
        (clone / path).unlink()
    else:
        shutil.rmtree(clone / path)
    assert says in missing(clone)
