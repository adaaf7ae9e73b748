"""Lesson 09, last exercise: right stages pass in any style, and a wrong one is named with what it spoils."""

import sys

import cloudpickle
import pytest
from support.readers_stages import RIGHT, STOPPED, STYLES, WRONG, Blank, FreesLate, RightOnFewRanks

from zerolab.course.attempts import attempt
from zerolab.course.exercise import solution_text
from zerolab.course.lessons.incident_room import measured
from zerolab.course.lessons.incident_room.from_empty import (
    at_a_trillion,
    check_stages,
    on_ranks,
    show_trillion,
)
from zerolab.course.lessons.incident_room.part_two_solution import Stage0, Stage1, Stage2, Stage3
from zerolab.course.lessons.incident_room.stage_trial import trial
from zerolab.stages.base import Stage

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as a notebook's cells travel

SOLUTION = [Stage0, Stage1, Stage2, Stage3]


def test_the_solution_passes_verify_and_is_rehearsed():
    result = check_stages(SOLUTION)
    assert result and "`verify` says so on 3 ranks in fp32, and on 2 in mixed precision" in result.message


def test_the_solution_has_80_lines_at_most():
    assert len(solution_text(SOLUTION).splitlines()) <= 80


@pytest.mark.parametrize("style", STYLES)
def test_other_styles_are_right_too(style):
    stages = dict(enumerate(STYLES[style]))
    assert on_ranks(stages) == at_a_trillion(stages) == dict.fromkeys(range(4))


def _try_all(stages: list[tuple[type[Stage], int]]) -> list:
    return [trial(stage, number) for stage, number in stages]


@pytest.fixture(scope="module")
def problems() -> dict[type, str | None]:
    """What the trial on three ranks says of each, all of them in one launch."""
    asked = [(stage, number) for stage, (number, *_) in WRONG.items()]
    outcome = attempt(_try_all, [(asked,)] * 3, timeout=240)
    assert outcome.failure is None
    by_stage = zip(asked, zip(*outcome.values, strict=True), strict=True)
    return {stage: measured.problem(number, seen) for (stage, number), seen in by_stage}


@pytest.mark.parametrize("stage", WRONG, ids=lambda stage: stage.__name__)
def test_what_a_wrong_stage_spoils_is_named(problems, stage):
    values, rest = problems[stage].removeprefix("values: ").split(". Traffic: ")
    traffic, memory = rest.split(". Memory: ")
    for said, expected in zip((values, traffic, memory), WRONG[stage][1:], strict=True):
        assert (said == RIGHT) if expected == RIGHT else (expected in said), said


@pytest.mark.parametrize("stage", STOPPED, ids=lambda stage: stage.__name__)
def test_a_stage_that_stops_the_training_is_told_why(stage):
    number, says = STOPPED[stage]
    stages = [Blank] * 4
    stages[number] = stage
    message = check_stages.diagnose(stages)
    (line,) = [line for line in message.splitlines() if line.startswith(f"  stage {number}: ")]
    assert says in line and message.count(": not written yet") == 3


def test_a_rehearsal_finds_what_shows_on_many_ranks_or_at_the_peak():
    said = at_a_trillion({1: RightOnFewRanks, 2: FreesLate, 3: Stage3})
    assert "on 1,024 ranks a rank holds" in said[1] and "at the peak" not in said[1]
    assert "GB at the peak" in said[2] and said[3] is None


def test_the_answer_is_four_classes():
    for answer, says in (
        ([Stage0], "the check got 1 things: write check_stages([Stage0, Stage1, Stage2, Stage3])"),
        (Stage0, "the check got a ABCMeta"),
        ([Blank] * 4, "not written yet: begin with"),
    ):
        assert check_stages.diagnose(answer).startswith(says)
    assert "this is a int, and no class" in check_stages.diagnose([Blank, Blank, Blank, 3])


def test_a_list_in_another_order_is_told():
    lines = check_stages.diagnose([Stage0, Stage2, Stage1, Stage3]).splitlines()
    assert lines[0] == "2 of the four stages are right" and lines[1] == "  stage 0: right"
    there = ". The list has {} in this place: write check_stages([Stage0, Stage1, Stage2, Stage3])"
    assert lines[2].endswith(f"sharded from stage 2 on{there.format('Stage2')}")
    assert lines[3].endswith(f"a view keeps all{there.format('Stage1')}")


def test_a_class_may_inherit_its_methods_but_not_from_the_stage_before():
    class Inherits(Stage0): ...

    class Stub(Inherits): ...

    said = check_stages.diagnose([Inherits, Stub, Blank, Blank])
    assert said.startswith("1 of the four stages is right\n  stage 0: right\n  stage 1: not written yet")


def test_the_readers_stages_are_shown_with_a_trillion_parameters(capsys):
    show_trillion([Stage0, Stage1, Blank, Stage3])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "stage 0: 16,017.0 GB of model states on each rank, 2.00Ψ sent in a step"
    assert lines[2] == "stage 2: not written yet" and "    15.6 GB" in lines[3]
