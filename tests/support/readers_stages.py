"""Stages as readers of lesson 09 write them: right in other styles, and wrong, with what the check says."""

import gc
import sys

import cloudpickle
import torch.distributed as dist

from zerolab.collectives import Work
from zerolab.course.lessons.incident_room.part_two_solution import Stage0, Stage1, Stage2, Stage3
from zerolab.stages import stage1, stage2
from zerolab.stages.base import Stage

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as a notebook's cells travel


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


# Wrong, and the training comes to its end: what it spoils, by dimension.


class NoStep(Stage0):
    def update(self, units, step):
        pass


class OwnsAPart(Stage0):
    def setup(self, unit):
        unit.own(self.comm.shard_range(unit.padded_numel))


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


class GathersBeforeAndWaitsLater(Stage1):
    """Whether the old values or the new ones are sent is a matter of time."""

    def update(self, units, step):
        for unit in units:
            gather = self.comm.all_gather(unit.flat, unit)
            step(unit)
            unit.expect(gather.wait)


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


class OwnsTheFirstPart(Stage1):
    def setup(self, unit):
        unit.own(slice(0, unit.padded_numel // self.comm.world_size))


class OwnsTheNextPart(Stage1):
    def setup(self, unit):
        unit.own(self.comm.shard_range(unit.padded_numel, (self.comm.rank + 1) % self.comm.world_size))


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
        if len(LOG) == 1:
            gc.collect(0)  # LOG[0] is behind the later ones in the collector's list then
        super().after_reduce(unit)


class KeepsASpare(Stage2):
    def after_reduce(self, unit):
        unit.spare = unit.grads.local[unit.owned].clone()
        super().after_reduce(unit)


class KeepsInGrads(Stage3):
    def after_reduce(self, unit):
        unit.grads.last = [unit.grads.local]
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
    OwnsAPart: (
        0,
        "rank 0 owns elements 0 to 4240 of unit blocks.0 alone, and updates no others. At stage 0 each rank",
        RIGHT,
        "sharded from stage 1 on",
    ),
    NothingReduced: (0, "each rank updates with its own", "moves 0Ψ (nothing in self.comm)", RIGHT),
    DividesTwice: (0, "divided by the number of ranks twice", RIGHT, RIGHT),
    HalfAnAllReduce: (0, "leaves the result in the own part only", "moves 1Ψ", RIGHT),
    TorchsOwn: (0, "off by", "not reduced with self.comm", RIGHT),
    AllReduceAndGather: (1, RIGHT, "3Ψ (2Ψ in all_reduce and 1Ψ in all_gather)", RIGHT),
    NoGather: (1, "the new values of its own part alone", "gathered once, after the update", RIGHT),
    NeverWaits: (1, "nobody waits for the all_gather", RIGHT, RIGHT),
    OwnsAll: (1, RIGHT, RIGHT, "171,136 bytes of optimizer state, and stage 1 holds 57,045"),
    DropsTheRemainder: (
        1,
        "Rank 0 owns elements 0 to 4234 of unit blocks.0",
        RIGHT,
        "some elements have no owner",
    ),
    OwnsTheFirstPart: (
        1,
        "Every rank owns elements 0 to 4240 of unit blocks.0, and what is reduced on rank 1 is 4240 to 8480",
        RIGHT,
        RIGHT,
    ),
    OwnsTheNextPart: (1, "Rank 0 owns elements 4240 to 8480 of unit blocks.0, and what", RIGHT, RIGHT),
    IsStage2: (1, RIGHT, RIGHT, "sharded from stage 2 on"),
    KeepsAView: (2, RIGHT, RIGHT, "a view keeps all"),
    FreesNothing: (2, RIGHT, RIGHT, "unit.grads.free_local()"),
    ParksGradients: (2, RIGHT, RIGHT, "are kept in self.last"),
    KeepsALog: (2, RIGHT, RIGHT, "are kept in LOG[0]"),
    KeepsASpare: (2, RIGHT, RIGHT, "are kept in unit.spare: a stage keeps no tensors of its own, and adds"),
    KeepsInGrads: (3, RIGHT, RIGHT, "are kept in unit.grads.last[0]: a stage keeps no tensors of its own"),
    NeverReshards: (3, "not made from the new shards", "2Ψ", "freed in setup, after detach_shard"),
    GathersNothing: (3, "NaN", "once more, for backward", RIGHT),
    GathersAfterUpdate: (3, RIGHT, "gathered after the update too", RIGHT),
}


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


class RestoresEarly(Stage3):
    def unshard(self, unit):
        unit.refill()
        work = self.comm.all_gather(unit.flat, unit)
        unit.restore_parameters()
        return work


class RestoresInParentheses(Stage3):
    def unshard(self, unit):
        unit.refill()
        return self.comm.all_gather(unit.flat, unit).then(unit.restore_parameters())


class RestoresFirst(Stage3):
    def unshard(self, unit):
        unit.refill()
        unit.restore_parameters()
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


class ExpectsNothing(Stage1):
    def update(self, units, step):
        for unit in units:
            step(unit)
            unit.expect(self.comm.all_gather(unit.flat, unit).wait())


class ReturnsInTheLoop(Stage0):
    def update(self, units, step):
        for unit in units:
            return step(unit)


class UpdatesEverySecond(Stage3):
    def update(self, units, step):
        for unit in units[::2]:
            step(unit)


class StepsAList(Stage0):
    def update(self, units, step):
        step(units)


class GathersItsPart(Stage1):
    def update(self, units, step):
        for unit in units:
            step(unit)
            unit.expect(self.comm.all_gather(unit.flat[unit.owned], unit).wait)


class OwnsItsPartOfAll(Stage0):
    def setup(self, unit):
        unit.own(self.comm.shard_range(unit.padded_numel))

    def after_reduce(self, unit):
        unit.grads.keep(unit.grads.local)


STOPPED = {
    ReturnsInTheLoop: (
        0,
        "update calls step for 1 of 4 units (root): call it for each of them. Does a return end",
    ),
    UpdatesEverySecond: (3, "update calls step for 2 of 4 units ("),
    StepsAList: (0, "update calls step with a list, and step takes one unit: call it for each of units"),
    GathersItsPart: (1, "it takes all of unit.flat, and fills in what the other ranks have"),
    OwnsItsPartOfAll: (0, "At stage 0 each rank owns everything: call unit.own(slice(0, unit.padded_numel))"),
    GathersBefore: (1, "before it calls step(unit): gather the parts after that, and not before it"),
    GathersBeforeAndWaitsLater: (1, "before it calls step(unit): gather the parts after that"),
    ReturnsNothing: (0, "reduce_grads returned NoneType"),
    KeepsNothing: (1, "after_reduce kept nothing of unit"),
    KeepsTooMuch: (1, "whose owned range has 4240 elements"),
    FreesFirst: (2, "after that local is None: keep a clone, then free"),
    ExpectsNothing: (1, "and it takes a function: write unit.expect("),
    RestoresNothing: (3, "is not whole when the Work of unshard ends"),
    RestoresEarly: (3, "calls restore_parameters before the all_gather of unit"),
    RestoresInParentheses: (3, "then(unit.restore_parameters), without parentheses after its name"),
    RestoresFirst: (3, "has begun: the parameters are not there yet"),
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


class FreesLate(Stage2):
    """Its gradients are whole until the update. After the step nothing of them is left."""

    def after_reduce(self, unit):
        unit.grads.keep(unit.grads.local[unit.owned].clone())

    def update(self, units, step):
        for unit in units:
            unit.grads.free_local()
        super().update(units, step)


class RightOnFewRanks(Stage1):
    """It is wrong where nobody can look at values."""

    def setup(self, unit):
        super().setup(unit) if self.comm.world_size < 8 else Stage0.setup(self, unit)
