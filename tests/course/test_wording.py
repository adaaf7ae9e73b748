"""Promise: a diagnosis reads as sentences: one colon each, capital letters, numbers that agree."""

import pytest

from zerolab.course.exercise import graded
from zerolab.course.wording import count, sentences, shortened


@pytest.mark.parametrize(
    ("diagnosis", "says"),
    [
        ("a is wrong: do b: or c", "A is wrong: do b. Or c"),
        ("that is the sum, or else that is the mean", "That is the sum. Or else that is the mean"),
        ("one: two, or else three: four: five", "One: two. Or else three: four. Five"),
        ("a is missing; b counts twice", "A is missing. B counts twice"),
        (
            "rank 0 waits: rank 1 has returned (line 3 of f: `x[a: b]`) (seen with 3 ranks)",
            "Rank 0 waits: rank 1 has returned (line 3 of f: `x[a: b]`) (seen with 3 ranks)",
        ),
        (
            "rank 1 stopped with KeyError: it: has; colons: of its own (line 2 of f: `d[0]`)",
            "Rank 1 stopped with KeyError: it: has; colons: of its own (line 2 of f: `d[0]`)",
        ),
        (
            "your test fails: ValueError: ranks is 5: pass 4 (line 2 of f: `train(5)`). change: it",
            "Your test fails: ValueError: ranks is 5: pass 4 (line 2 of f: `train(5)`). Change: it",
        ),
        ("none is right: a: b\n  stage 0: values: NaN", "None is right: a. B\n  stage 0: values: NaN"),
        ("got dict, {'a': 1}: rank 0's value: a tensor", "Got dict, {'a': 1}: rank 0's value. A tensor"),
        ("flat was added once more: once is enough: stop", "flat was added once more: once is enough. Stop"),
        ("one: two: psi counts twice", "One: two. psi counts twice"),
        ("", ""),
    ],
)  # fmt: skip
def test_clauses_become_sentences(diagnosis, says):
    assert sentences(diagnosis) == says


def test_a_check_prints_sentences():
    @graded("Never.", call=None)
    def check(answer):
        return "stage 1: the master weights are missing: K is 12, or else that is GB: return bytes"

    said = "Stage 1: the master weights are missing. K is 12. Or else that is GB: return bytes."
    assert check(None).message == said


def test_a_question_gets_no_full_stop():
    @graded("Never.", call=None)
    def check(answer):
        return "is there a bracket missing?"

    assert check(None).message == "Is there a bracket missing?"


def test_numbers_agree_and_words_stay_whole():
    assert [count(number, "element") for number in (0, 1, 2)] == ["0 elements", "1 element", "2 elements"]
    assert shortened("short") == "short" and shortened("a" * 70) == "a" * 59 + " …"
    assert shortened("{'parameters': 14000000000.0, 'gradients': 14000000000.0, 'state': 8}") == (
        "{'parameters': 14000000000.0, 'gradients': 14000000000.0 …}"
    )
