"""Promise: every lesson can be graded: what it asks is found, with its minutes and its right answers."""

import ctypes
import sys

import nbformat
import pytest
from support.lessons import NAMES, exercise

from zerolab.course.classroom import books, clone, grading
from zerolab.course.classroom.children import none_left


@pytest.mark.parametrize("name", NAMES)
def test_every_lesson_can_be_graded(name: str):
    """Each check, prediction and quiz is found, with the minutes and the answer."""
    book = nbformat.read(clone.lesson_paths()[name], as_version=4)
    ours, calls = books.lesson(name), list(books.asked(book, clone.checks(name)))
    assert books.lesson_of(book) == name and sorted(ours.minutes) == sorted(clone.checks(name))
    kinds = [call.kind for call in calls]
    assert kinds.count("quiz") == 1 and kinds.count("exercise") == len(ours.minutes)
    assert kinds.count("prediction") == len(ours.answers) >= 1, "two predictions have one name"
    assert all(answer == answer and 0 <= tolerance < 0.2 for answer, tolerance in ours.answers.values())


def test_a_tolerance_is_found_where_a_function_makes_the_prediction():
    assert books.lesson("zero_stage_3").answers["traffic"][1] == 0.005


@pytest.mark.parametrize("name", NAMES)
def test_the_packages_own_solution_is_recognised(name: str):
    stub, call, solution = exercise(name)
    check = call.partition("(")[0]
    assert grading._holds_solution(f"# mine\n{solution}\n\n{call}", name, check)
    assert not grading._holds_solution(f"{stub}\n{call}", name, check)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no subreapers")
def test_a_process_adopts_orphans_only_while_it_waits_for_others_to_end():
    """The tests of launches count the processes that are left, and orphans are not theirs."""
    found = ctypes.c_int()
    adopts = lambda: (ctypes.CDLL(None).prctl(37, ctypes.byref(found)), found.value)[
        1
    ]  # PR_GET_CHILD_SUBREAPER
    with none_left():
        assert adopts() == 1
    assert adopts() == 0
