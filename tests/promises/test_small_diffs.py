"""Promise: the stages are small diffs of each other, so that to compare two files is to read the lesson."""

import ast
import difflib
from itertools import pairwise
from pathlib import Path

import pytest

from zerolab import stages

FILES = [Path(stages.__file__).parent / f"stage{number}.py" for number in range(4)]
VERBS = ["setup", "unshard", "reshard", "reduce_grads", "after_reduce", "update"]
MOST_LINES, MOST_CHANGED = 60, 12


def without_docstrings(source: str) -> list[str]:
    """The lines of code: what is left when docstrings, comments and blank lines are taken away."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.ClassDef):
            node.name = "Stage"  # the number in the name is no part of the lesson
    return ast.unparse(tree).split("\n")


def changed_lines(before: str, after: str) -> list[str]:
    """The lines that one has and the other has not, marked by - and +."""
    lines = difflib.ndiff(without_docstrings(before), without_docstrings(after))
    return [line for line in lines if line.startswith(("+ ", "- ")) and line[2:].strip()]


@pytest.mark.parametrize("before, after", list(pairwise(FILES)), ids=lambda path: path.stem)
def test_a_stage_is_the_one_before_with_a_few_lines_changed(before: Path, after: Path):
    changed = changed_lines(before.read_text(), after.read_text())
    assert 1 <= len(changed) <= MOST_CHANGED, "\n".join(changed)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_stage_fits_on_a_screen_and_is_one_final_class_of_six_verbs(path: Path):
    source = path.read_text()
    assert len(source.splitlines()) <= MOST_LINES
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    (stage,) = classes
    assert stage.name == path.stem.capitalize()
    assert [ast.unparse(decorator) for decorator in stage.decorator_list] == ["final"]
    assert [node.name for node in stage.body if isinstance(node, ast.FunctionDef)] == VERBS
    assert not [node for node in stage.body if isinstance(node, ast.Assign | ast.AnnAssign)]


def test_the_verbs_have_the_same_signature_in_every_stage():
    def signatures(path: Path) -> list[str]:
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        verbs = [node for node in nodes if node.name in VERBS]
        return [f"{verb.name}({ast.unparse(verb.args)}) -> {ast.unparse(verb.returns)}" for verb in verbs]

    assert [signatures(path) for path in FILES] == [signatures(FILES[0].with_name("base.py"))] * 4


@pytest.mark.parametrize(
    "before, lesson",
    [
        (0, "+ reduce_scatter - all_reduce + all_gather"),  # the all-reduce opens up
        (1, "+ clone + free_local"),  # gradients live only until they are reduced
        (
            2,
            "+ refill + all_gather + restore_parameters + free - all_gather",
        ),  # parameters too, so none follows update
    ],
)
def test_the_lesson_is_in_the_diff(before: int, lesson: str):
    changed = changed_lines(FILES[before].read_text(), FILES[before + 1].read_text())
    signs = lesson.split()
    for sign, word in zip(signs[::2], signs[1::2], strict=True):
        assert any(line.startswith(sign) and word in line for line in changed), (sign, word, changed)


def test_hybrid_sharding_is_stage_3_and_a_second_group():
    """The verbs that move and free parameters are stage 3's; a reduction goes on among the copies."""
    hybrid = FILES[0].with_name("hybrid.py").read_text()
    changed = changed_lines(FILES[3].read_text(), hybrid)
    assert 1 <= len(changed) <= 2 * MOST_CHANGED, "\n".join(changed)
    assert len(hybrid.splitlines()) <= MOST_LINES
    assert any(line.startswith("+") and "copies.all_reduce" in line for line in changed)
    assert not any("unshard" in line or "reshard" in line or "def update" in line for line in changed)


def test_a_larger_diff_is_seen():
    before, after = FILES[0].read_text(), FILES[3].read_text()
    assert len(changed_lines(before, after)) > MOST_CHANGED
    assert changed_lines(before, before.replace('"""Stage 0', '"""Another text')) == []
