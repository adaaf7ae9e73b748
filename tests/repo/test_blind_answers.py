"""Promise: blind answers are judged by what their checks say, and each one can be read."""

import subprocess
import sys
from pathlib import Path

import blind_answers
import pytest
from support import ROOT

RIGHT = """
# %% check_owners | right: a heap |
import heapq


def owners(work, world_size):
    ranks, owner = [(0, rank) for rank in range(world_size)], [0] * len(work)
    for place in sorted(range(len(work)), key=lambda place: -work[place]):
        busy, owner[place] = heapq.heappop(ranks)
        heapq.heappush(ranks, (busy + work[place], owner[place]))
    return owner
"""
WRONG = """
# %% check_owners | all on rank 0 | WORDS
def owners(work, world_size):
    return [0] * len(work)
"""


def judged(tmp_path: Path, text: str, monkeypatch) -> int:
    (tmp_path / "10_whole_matrices.py").write_text(text)
    monkeypatch.setattr(blind_answers, "ANSWERS", tmp_path)
    return blind_answers.main([])


def test_the_answers_of_a_lesson_are_judged(tmp_path: Path, monkeypatch, capsys):
    named = WRONG.replace("WORDS", "Every matrix goes to rank 0")
    assert judged(tmp_path, RIGHT + named + WRONG.replace("WORDS", ""), monkeypatch) == 0
    said = capsys.readouterr().out
    assert "3 answers, 2 of them wrong: {'accepted': 1, 'named': 1, 'not named': 1}" in said
    assert "named: 50 % of the wrong answers" in said


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (WRONG, "OTHER WORDS"),
        (WRONG.replace("all on", "right: all on"), "REFUSED, AND IT IS RIGHT"),
        (RIGHT.replace("right: ", ""), "PASSED, AND IT IS WRONG"),
    ],
)
def test_a_verdict_that_should_not_be_is_in_the_exit_status(
    tmp_path: Path, text, verdict, monkeypatch, capsys
):
    assert judged(tmp_path, text, monkeypatch) == 1
    assert verdict in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:assertion is always true")  # it is one of the answers
def test_every_answer_can_be_read_and_has_a_check_of_its_lesson():
    for path in sorted((ROOT / "tests/blind").glob("*.py")):
        found = list(blind_answers.answers(path))
        calls = blind_answers.calls(path.stem[3:])
        assert {answer.check for answer in found} == set(calls), path.name
        for answer in found:
            compile(answer.code, path.name, "exec")


def test_the_script_starts(tmp_path: Path):
    command = [sys.executable, ROOT / "tests/blind_answers.py", "no_such_lesson"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "no_such_lesson" in done.stderr
