"""Promise: no check hangs, dies, floods the page or fails itself, whatever an answer does. Checks are found.

That an answer ends its process or raises is tried with every check in test_checks.py.
"""

import importlib
import os
from collections.abc import Callable

import pytest
from support.lessons import EXERCISES, NAMES, exercise, solutions_travel_by_value
from support.readers_stages import Blank

import zerolab
from zerolab.course.lessons.incident_room import check_stages
from zerolab.course.lessons.incident_room.part_two_solution import Stage0

solutions_travel_by_value(__name__)
SECONDS, STAGE_SECONDS = 3.0, 8.0  # deadlines of these tests; the four stages begin to train later
MOST_LINES = 60


def check_of(name: str, place: int) -> Callable:
    call = exercise(name, place)[1]
    return getattr(importlib.import_module(f"zerolab.course.lessons.{name}"), call.partition("(")[0])


def checks(name: str) -> list[Callable]:
    """The lesson's checks of functions and classes that are called; check_stages gets four classes."""
    found = [check_of(*each) for each in EXERCISES if each[0] == name]
    return [check for check in found if check.__name__ != check_stages.__name__]


MAIN = [checks(name)[1 % len(checks(name))] for name in NAMES]
"""One check of each lesson, the second where there are two: mostly the lesson's main exercise."""


@pytest.fixture
def deadline(monkeypatch) -> Callable[[float], None]:
    """Lower every deadline of a check to so many seconds."""
    launch = zerolab.launch

    def lower(seconds: float) -> None:
        sooner = lambda *args, timeout, **kwargs: launch(*args, timeout=min(timeout, seconds), **kwargs)
        monkeypatch.setattr(zerolab, "launch", sooner)

    return lower


def refused(check: Callable, answer: object) -> str:
    """What the check says of an answer that it refuses, in one call, without failing itself."""
    result = check(answer)
    assert not result and result.message and "failed itself" not in result.message
    return result.message


def loops(*_):
    while True:
        pass


def floods(*_):
    for _ in range(20_000):
        print("to be " * 10)


def nan(*_):
    return float("nan")


def text(*_):
    return "17"


def pair(*_):
    return (1, 2)


VALUES = (nan, text, pair)
TURNS = [
    (checks(name)[turn % len(checks(name))], VALUES[turn % len(VALUES)])
    for name in NAMES
    for turn in range(max(len(VALUES), len(checks(name))))
]
"""Each check gets one of the values at least, and each lesson gets all of them."""


@pytest.mark.parametrize("check", MAIN, ids=lambda check: check.__name__)
def test_an_endless_loop_is_named_with_its_line(check, deadline):
    deadline(SECONDS)
    said = refused(check, loops)
    assert "still computing" in said and "endless loop? (line " in said and "of loops" in said


@pytest.mark.parametrize("check", MAIN, ids=lambda check: check.__name__)
def test_a_flood_of_output_is_cut(check, capsys):
    refused(check, floods)
    shown = capsys.readouterr().out
    assert shown.count("\n") < MOST_LINES and "the rest is left out" in shown and shown.count("✗") == 1


@pytest.mark.parametrize(("check", "answer"), TURNS, ids=lambda each: each.__name__)
def test_a_value_of_another_kind_is_refused(check, answer):
    assert refused(check, answer)


def test_every_check_gets_a_value_and_every_lesson_gets_all():
    assert {check.__name__ for check, _ in TURNS} | {check_stages.__name__} == {
        check_of(*each).__name__ for each in EXERCISES
    }
    lesson_of = lambda check: check.__module__.split(".")[3]
    for name in NAMES:
        assert {answer for check, answer in TURNS if lesson_of(check) == name} == set(VALUES)


# ---- the four stages of lesson 09


class Loops(Stage0):
    def update(self, units, step):
        while True:
            pass


class Exits(Stage0):
    def update(self, units, step):
        os._exit(3)


class Floods(Stage0):
    def update(self, units, step):
        for _ in range(20_000):
            print("to be " * 10)


class Nan(Stage0):
    def update(self, units, step):
        super().update(units, step)
        for unit in units:
            unit.flat.fill_(float("nan"))


class Text(Stage0):
    def reduce_grads(self, unit):
        return "17"


class Pair(Stage0):
    def reduce_grads(self, unit):
        return (1, 2)


HOSTILE_STAGES = {
    Loops: "still computing",
    Exits: "ended its own process, as os._exit does",
    Floods: "values: ",
    Nan: "values: ",
    Text: "reduce_grads returned str, and the engine waits for the Work",
    Pair: "reduce_grads returned tuple, and the engine waits for the Work",
}


@pytest.mark.parametrize("stage", HOSTILE_STAGES, ids=lambda stage: stage.__name__)
def test_a_hostile_stage_gets_its_sentence(stage, deadline, capsys):
    deadline(STAGE_SECONDS)
    assert HOSTILE_STAGES[stage] in refused(check_stages, [stage, Blank, Blank, Blank])
    assert capsys.readouterr().out.count("\n") < MOST_LINES
