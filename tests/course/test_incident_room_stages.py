"""Lesson 09, last exercise: right stages pass in any style, and a wrong one is named with what it spoils."""

import sys

import cloudpickle
import pytest
import torch.distributed as dist

from zerolab.collectives import Work
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
from zerolab.stages import stage1, stage2
from zerolab.stages.base import Stage

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as a notebook's cells travel

SOLUTION = [Stage0, Stage1, Stage2, Stage3]


class Blank(Stage): ...


# Right, each in a style of its own.


class TwoHalves(Stage0):
    """The all-reduce as its two halves."""

    def reduce_grads(self, unit):
        halves = self.comm.reduce_scatter(unit.grads.local, unit, unit.grads.op)
        return halves.then(lambda: self.comm.all_gather(unit.grads.local, unit))


class GathersAtOnce(Stage1):
    def update(self, units, step):
        for unit in units:
            step(unit)
        for work in [self.comm.all_gather(unit.flat, unit) for unit in units]:
            work.wait()


class FreesBeforeItKeeps(GathersAtOnce):
    def after_reduce(self, unit):
        own = unit.grads.local[self.comm.shard_range(unit.padded_numel)].clone()
        unit.grads.free_local()
        unit.grads.keep(own)


class Alone(Stage):
    """Stage 3 that derives from no other stage, with names of its own."""

    def __init__(self, comm):
        super().__init__(comm)
        self.mine = lambda unit: comm.shard_range(unit.padded_numel)

    def setup(self, group):
        group.own(self.mine(group))
        group.detach_shard()
        group.free()

    def unshard(self, group):
        group.refill()
        work = self.comm.all_gather(group.flat, group)
        work.wait()
        group.restore_parameters()
        return Work()

    def reshard(self, group):
        group.free()

    def reduce_grads(self, group):
        return self.comm.reduce_scatter(group.grads.local, group, op=group.grads.op)

    def after_reduce(self, group):
        group.grads.keep(group.grads.local[self.mine(group)].clone())
        group.grads.free_local()

    def update(self, groups, step):
        list(map(step, groups))


def made(number: int) -> type[Stage]:
    """All four from one function."""

    class Made(Stage):
        def setup(self, unit):
            unit.own(slice(0, unit.padded_numel) if number == 0 else self.comm.shard_range(unit.padded_numel))
            if number == 3:
                unit.detach_shard()
                self.reshard(unit)

        def unshard(self, unit):
            unit.refill()
            return self.comm.all_gather(unit.flat, unit).then(unit.restore_parameters)

        def reshard(self, unit):
            if number == 3:
                unit.free()

        def reduce_grads(self, unit):
            reduce = self.comm.reduce_scatter if number else self.comm.all_reduce
            return reduce(unit.grads.local, unit, unit.grads.op)

        def after_reduce(self, unit):
            own = unit.grads.local[unit.owned]
            unit.grads.keep(own.clone() if number > 1 else own)
            if number > 1:
                unit.grads.free_local()

        def update(self, units, step):
            for unit in units:
                step(unit)
                if number in (1, 2):
                    unit.expect(self.comm.all_gather(unit.flat, unit).wait)

    return Made


STYLES = {
    "in other ways": [TwoHalves, GathersAtOnce, FreesBeforeItKeeps, Alone],
    "from one function": [made(number) for number in range(4)],
}


def test_the_solution_passes_verify_and_is_rehearsed():
    result = check_stages(SOLUTION)
    assert result and "`verify` says so on 3 ranks in fp32, and on 2 in mixed precision" in result.message


def test_the_solution_has_80_lines_at_most():
    assert len(solution_text(SOLUTION).splitlines()) <= 80


@pytest.mark.parametrize("style", STYLES)
def test_other_styles_are_right_too(style):
    stages = dict(enumerate(STYLES[style]))
    assert on_ranks(stages) == at_a_trillion(stages) == dict.fromkeys(range(4))


# Wrong, and the training comes to its end: what it spoils, by dimension.


class NoStep(Stage0):
    def update(self, units, step):
        pass


class NothingReduced(Stage0):
    def reduce_grads(self, unit):
        return Work()


class DividesTwice(Stage0):
    def after_reduce(self, unit):
        unit.grads.local /= self.comm.world_size
        super().after_reduce(unit)


class HalfAnAllReduce(Stage0):
    reduce_grads = Stage1.reduce_grads


class TorchsOwn(Stage0):
    def reduce_grads(self, unit):
        dist.all_reduce(unit.grads.local)
        return Work()


class AllReduceAndGather(Stage1):
    reduce_grads = Stage0.reduce_grads


class NoGather(Stage1):
    update = Stage0.update


class GathersBefore(Stage1):
    def update(self, units, step):
        for unit in units:
            self.comm.all_gather(unit.flat, unit).wait()
            step(unit)


class NeverWaits(Stage1):
    def update(self, units, step):
        for unit in units:
            step(unit)
            self.comm.all_gather(unit.flat, unit)


class OwnsAll(Stage1):
    setup = Stage0.setup


class DropsTheRemainder(Stage1):
    def setup(self, unit):
        each = unit.numel // self.comm.world_size
        unit.own(slice(self.comm.rank * each, (self.comm.rank + 1) * each))


class IsStage2(Stage1):
    after_reduce = Stage2.after_reduce


class KeepsAView(Stage2):
    def after_reduce(self, unit):
        unit.grads.keep(unit.grads.local[unit.owned])
        unit.grads.free_local()


class FreesNothing(Stage2):
    def after_reduce(self, unit):
        unit.grads.keep(unit.grads.local[unit.owned].clone())


class ParksGradients(Stage2):
    def after_reduce(self, unit):
        self.last = unit.grads.local
        super().after_reduce(unit)


LOG: list = []


class KeepsALog(Stage2):
    def after_reduce(self, unit):
        LOG.append(unit.grads.local)
        super().after_reduce(unit)


class NeverReshards(Stage3):
    def reshard(self, unit):
        pass


class GathersNothing(Stage3):
    def unshard(self, unit):
        unit.refill()
        return Work().then(unit.restore_parameters)


class GathersAfterUpdate(Stage3):
    def update(self, units, step):
        for unit in units:
            step(unit)
            self.unshard(unit).wait()
            self.reshard(unit)


RIGHT = "right"
WRONG = {  # by stage: values, traffic, memory
    NoStep: (0, "those from before the step", RIGHT, "0 bytes of optimizer state"),
    NothingReduced: (0, "each rank updates with its own", "moves 0Ψ (nothing in self.comm)", RIGHT),
    DividesTwice: (0, "divided by the number of ranks twice", RIGHT, RIGHT),
    HalfAnAllReduce: (0, "leaves the result in the own part only", "moves 1Ψ", RIGHT),
    TorchsOwn: (0, "off by", "not reduced with self.comm", RIGHT),
    AllReduceAndGather: (1, RIGHT, "3Ψ (2Ψ in all_reduce and 1Ψ in all_gather)", RIGHT),
    NoGather: (1, "the new values of its own part alone", "gathered once, after the update", RIGHT),
    GathersBefore: (1, "and not before it", RIGHT, RIGHT),
    NeverWaits: (1, "nobody waits for the all_gather", RIGHT, RIGHT),
    OwnsAll: (1, RIGHT, RIGHT, "171,136 bytes of optimizer state, and stage 1 holds 57,045"),
    DropsTheRemainder: (1, "off by", RIGHT, "some elements have no owner"),
    IsStage2: (1, RIGHT, RIGHT, "sharded from stage 2 on"),
    KeepsAView: (2, RIGHT, RIGHT, "a view keeps all"),
    FreesNothing: (2, RIGHT, RIGHT, "unit.grads.free_local()"),
    ParksGradients: (2, RIGHT, RIGHT, "are kept in self.last"),
    KeepsALog: (2, RIGHT, RIGHT, "are kept in LOG[0]"),
    NeverReshards: (3, "not made from the new shards", "2Ψ", "freed in setup, after detach_shard"),
    GathersNothing: (3, "NaN", "once more, for backward", RIGHT),
    GathersAfterUpdate: (3, RIGHT, "gathered after the update too", RIGHT),
}


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
        assert said == RIGHT if expected == RIGHT else expected in said


# Wrong, and the training stops; or 16 bits show it.


class ReturnsNothing(Stage0):
    def reduce_grads(self, unit):
        self.comm.all_reduce(unit.grads.local, unit, unit.grads.op)


class KeepsNothing(Stage1):
    def after_reduce(self, unit):
        pass


class KeepsTooMuch(Stage1):
    def after_reduce(self, unit):
        unit.grads.keep(unit.grads.local)


class FreesFirst(Stage2):
    def after_reduce(self, unit):
        unit.grads.free_local()
        unit.grads.keep(unit.grads.local[unit.owned].clone())


class RestoresNothing(Stage3):
    def unshard(self, unit):
        unit.refill()
        return self.comm.all_gather(unit.flat, unit)


class RefillsNothing(Stage3):
    def unshard(self, unit):
        return self.comm.all_gather(unit.flat, unit).then(unit.restore_parameters)


class DetachesNothing(Stage3):
    def setup(self, unit):
        Stage1.setup(self, unit)
        unit.free()


class GathersAsStage2(Stage3):
    update = Stage2.update


class RankZeroIsIdle(Stage2):
    def reduce_grads(self, unit):
        return super().reduce_grads(unit) if self.comm.rank else Work()


class Borrows(Stage1):
    def update(self, units, step):
        stage2.Stage2(self.comm).update(units, step)


class AlwaysSums(Stage0):
    def reduce_grads(self, unit):
        return self.comm.all_reduce(unit.grads.local, unit)


class OwnsNothing(Stage0):
    def setup(self, unit):
        pass


class OneMethod(Stage):
    def setup(self, unit):
        unit.own(slice(0, unit.padded_numel))


class OtherArguments(Stage1):
    def update(self, units):
        pass


class NoStage:
    def setup(self, unit):
        pass


STOPPED = {
    ReturnsNothing: (0, "reduce_grads returned NoneType"),
    KeepsNothing: (1, "after_reduce kept nothing of unit"),
    KeepsTooMuch: (1, "whose owned range has 4240 elements"),
    FreesFirst: (2, "'NoneType' object is not subscriptable (line "),
    RestoresNothing: (3, "is not whole when the Work of unshard ends"),
    RefillsNothing: (3, "refill before all_gather"),
    DetachesNothing: (3, "detach_shard comes before free"),
    GathersAsStage2: (3, "at stage 3 it calls step(unit) and gathers nothing"),
    RankZeroIsIdle: (2, "ranks took different paths"),
    Borrows: (1, "this uses zerolab's own Stage2"),
    AlwaysSums: (0, "right in fp32. unit.own makes the fp32 originals"),
    OwnsNothing: (0, "on 2 ranks in mixed precision: values: off by"),
    OneMethod: (0, "it lacks unshard, reshard, reduce_grads, after_reduce, update"),
    OtherArguments: (1, "update is called as self.update(units, step)"),
    NoStage: (1, "write class NoStage(Stage)"),
    stage1.Stage1: (1, "this uses zerolab.stages.stage1, which is what you write here"),
}


@pytest.mark.parametrize("stage", STOPPED, ids=lambda stage: stage.__name__)
def test_a_stage_that_stops_the_training_is_told_why(stage):
    number, says = STOPPED[stage]
    stages = [Blank] * 4
    stages[number] = stage
    message = check_stages.diagnose(stages)
    (line,) = [line for line in message.splitlines() if line.startswith(f"  stage {number}: ")]
    assert says in line and message.count(": not written yet") == 3


class RightOnFewRanks(Stage1):
    """It is wrong where nobody can look at values."""

    def setup(self, unit):
        super().setup(unit) if self.comm.world_size < 8 else Stage0.setup(self, unit)


def test_a_rehearsal_finds_what_shows_on_many_ranks_only():
    said = at_a_trillion({1: RightOnFewRanks, 2: Stage2})
    assert "on 1,024 ranks" in said[1] and "are enough" in said[1] and said[2] is None


def test_the_answer_is_four_classes():
    for answer, says in (
        ([Stage0], "the check got 1 things: write check_stages([Stage0, Stage1, Stage2, Stage3])"),
        (Stage0, "the check got a ABCMeta"),
        ([Blank] * 4, "not written yet: begin with"),
    ):
        assert check_stages.diagnose(answer).startswith(says)
    assert "this is a int, and no class" in check_stages.diagnose([Blank, Blank, Blank, 3])


def test_the_readers_stages_are_shown_with_a_trillion_parameters(capsys):
    show_trillion([Stage0, Stage1, Blank, Stage3])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "stage 0: 16,017.0 GB of model states on each rank, 2.00Ψ sent in a step"
    assert lines[2] == "stage 2: not written yet" and "    15.6 GB" in lines[3]
