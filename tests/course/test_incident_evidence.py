"""Lesson 09: where no known mistake explains the values, the updates and the loaded momentum are read."""

import re

import pytest
import torch
import torch.distributed as dist
from support.lessons import solutions_travel_by_value
from support.tickets import diagnosis

from zerolab import ring
from zerolab.course.lessons.incident_room import (
    MOMENTUM,
    Engine1,
    Engine2,
    Engine3,
    Engine4,
    Engine5,
    Engine6,
    Engine7,
    Engine8,
    Engine9,
    Engine10,
    Engine11,
    Engine12,
)

solutions_travel_by_value(__name__)


class LastTakesAll1(Engine1):
    def cut(self):
        size = self.flat.numel() // self.world_size
        stop = None if self.rank == self.world_size - 1 else size * (self.rank + 1)
        self.even, self.shard = self.flat, self.flat[size * self.rank : stop]
        self.optimizer = torch.optim.SGD([self.shard], self.lr, MOMENTUM)


class RoundedUp1(Engine1):
    def cut(self):
        size = -(-self.flat.numel() // self.world_size)
        self.even, self.shard = self.flat, self.flat[size * self.rank : size * (self.rank + 1)]
        self.optimizer = torch.optim.SGD([self.shard], self.lr, MOMENTUM)


class DividedByAll2(Engine2):
    def step(self, batches):
        for batch in batches:
            self.reduce(batch.gradient(self.flat) / (self.world_size * len(batches)))
        self.update(1)
        self.gather()


class WithoutRank0(Engine2):
    def step(self, batches):
        for batch in batches:
            self.reduce(batch.gradient(self.flat) * (self.rank > 0) / len(batches))
        self.update(1)
        self.gather()


class OwnOnceMore2(Engine2):
    def step(self, batches):
        for batch in batches:
            gradient = batch.gradient(self.flat)
            own = gradient[ring.chunks(self.flat.numel(), self.world_size)[self.rank]].clone()
            self.reduce(gradient)
            self.total = self.total + own
        self.update(len(batches))
        self.gather()


class InOrderOfDict6(Engine6):
    def step(self, batches):
        ready = dict(batches[0].gradients(self.parameters))
        for name, gradient in ready.items():
            self.reduce(name, gradient)
        self.update()
        self.gather()


class ByRank6(Engine6):
    def step(self, batches):
        ready = dict(batches[0].gradients(self.parameters))
        for name in sorted(ready, reverse=self.rank == 2):
            self.reduce(name, ready[name])
        self.update()
        self.gather()


class Barrier6(Engine6):
    def reduce(self, name, gradient):
        dist.barrier()
        super().reduce(name, gradient)


class StateCleared7(Engine7):
    def update(self, micro_batches):
        super().update(micro_batches)
        self.optimizer.state.clear()
        self.total = 0


class NewOptimizer7(Engine7):
    def update(self, micro_batches):
        super().update(micro_batches)
        self.cut()
        self.total = 0


class HalfCleared7(Engine7):
    def update(self, micro_batches):
        super().update(micro_batches)
        self.total = self.total / 2


class Subtracted7(Engine7):
    before = 0

    def update(self, micro_batches):
        self.before, self.total = self.total, self.total - self.before
        super().update(micro_batches)
        self.total = 0


class CatAsReady6(Engine6):
    def step(self, batches):
        ready = list(batches[0].gradients(self.parameters))
        whole = torch.cat([gradient for _, gradient in ready])
        dist.all_reduce(whole)
        pieces = whole.split([gradient.numel() for _, gradient in ready])
        for (name, _), piece in zip(ready, pieces, strict=True):
            mine = ring.chunks(piece.numel(), self.world_size)[self.rank]
            self.shards[name].grad = piece[mine] / self.world_size
        self.update()
        self.gather()


class LastRankCrossed6(Engine6):
    """The last rank adds its gradient of the embedding to the others' of the body."""

    def step(self, batches):
        ready = dict(batches[0].gradients(self.parameters))
        if self.rank == self.world_size - 1:
            ready["body"][: len(ready["embedding"])] = ready["embedding"]
        for name in self.parameters:
            self.reduce(name, ready[name])
        self.update()
        self.gather()


class AllReduce6(Engine6):
    def step(self, batches):
        ready = dict(batches[0].gradients(self.parameters))
        for name, whole in self.parameters.items():
            dist.all_reduce(ready[name])
            mine = ring.chunks(whole.numel(), self.world_size)[self.rank]
            self.shards[name].grad = ready[name][mine] / self.world_size
        self.update()
        self.gather()


class GathersTwice2(Engine2):
    def step(self, batches):
        for batch in batches:
            self.reduce(batch.gradient(self.flat))
        self.update(len(batches))
        self.gather()
        self.gather()


class GatherByAllReduce2(Engine2):
    def gather(self):
        mine = ring.chunks(self.flat.numel(), self.world_size)[self.rank]
        self.flat[: mine.start], self.flat[mine.stop :] = 0, 0
        dist.all_reduce(self.flat)

    def step(self, batches):
        for batch in batches:
            self.reduce(batch.gradient(self.flat))
        self.update(len(batches))
        self.gather()


class LargerRate2(Engine2):
    def update(self, micro_batches):
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * micro_batches
        super().update(micro_batches)


class MeanOfAll7(Engine7):
    seen = 0

    def update(self, micro_batches):
        self.seen += micro_batches
        super().update(self.seen)


class OnlyOnce7(Engine7):
    done = False

    def update(self, micro_batches):
        if not self.done:
            super().update(micro_batches)
        self.done, self.total = True, 0


class OneShardStays7(Engine7):
    """The last rank's first update is right; from then on its shard is rounded."""

    def update(self, micro_batches):
        super().update(micro_batches)
        self.total = 0
        if self.rank == self.world_size - 1:
            self.optimizer.state[self.shard]["momentum_buffer"].sign_()


class OldLength9(Engine9):
    def load(self, files):
        whole, size = torch.cat(files), len(files[0])
        momentum, mine = torch.zeros_like(self.shard), whole[self.rank * size : (self.rank + 1) * size]
        fits = min(len(mine), len(momentum))
        momentum[:fits] = mine[:fits]
        self.optimizer.state[self.shard]["momentum_buffer"] = momentum


class BeginsByOldLength9(Engine9):
    def load(self, files):
        whole, begin = torch.cat(files), self.rank * len(files[0])
        momentum, mine = torch.zeros_like(self.shard), whole[begin : begin + len(self.shard)]
        momentum[: len(mine)] = mine
        self.optimizer.state[self.shard]["momentum_buffer"] = momentum


class HalfOfIt9(Engine9):
    def load(self, files):
        whole = torch.cat(files)
        momentum = whole[self.mine].clone()
        momentum[len(momentum) // 2 :] = 0
        self.optimizer.state[self.shard]["momentum_buffer"] = momentum


class WithPadding8(Engine8):
    def save(self):
        whole = torch.cat([self.momentum(place) for place in range(len(self.units))])
        first = len(self.units[0])
        return [whole[:first], whole[first:]]


class OtherLength8(Engine8):
    def save(self):
        whole = torch.cat([self.momentum(place)[: len(unit)] for place, unit in enumerate(self.units)])
        second = len(self.padded[1])
        return [whole[:second], whole[second:]]


class OwnShards8(Engine8):
    def save(self):
        return [self.optimizer.state[shard]["momentum_buffer"].clone() for shard in self.shards]


class OwnLength9(Engine9):
    def load(self, files):
        whole, size = torch.cat(files), len(self.shard)
        mine = whole[self.rank * size : (self.rank + 1) * size]
        self.optimizer.state[self.shard]["momentum_buffer"] = mine.clone()


class NeverGathered9(Engine9):
    def save(self):
        whole = torch.zeros_like(self.flat)
        whole[self.mine] = super().save()
        return whole

    def load(self, files):
        self.optimizer.state[self.shard]["momentum_buffer"] = files[0][self.mine].clone()


class FirstsOnly9(Engine9):
    def save(self):
        return super().save()[:20]

    def load(self, files):
        whole = torch.cat([torch.cat(files), torch.zeros(103)])
        self.optimizer.state[self.shard]["momentum_buffer"] = whole[self.mine].clone()


class OneTooLate9(Engine9):
    def load(self, files):
        whole = torch.cat(files).roll(-1)
        self.optimizer.state[self.shard]["momentum_buffer"] = whole[self.mine].clone()


class NeverReset10(Engine10):
    seen = 0.0

    def step(self, batches):
        self.seen += sum(map(len, batches))
        count = torch.tensor([self.seen])
        dist.all_reduce(count)
        for batch in batches:
            self.reduce(batch.gradient(self.flat) * len(batch))
        self.update(count.item() / self.world_size)
        self.gather()


class DividedAgain10(Engine10):
    def step(self, batches):
        count = torch.tensor([float(sum(map(len, batches)))])
        dist.all_reduce(count)
        for batch in batches:
            self.reduce(batch.gradient(self.flat) * len(batch) / count.item())
        self.update(len(batches))
        self.gather()


class GatheredOnce12(Engine12):
    whole = None

    def step(self, batches):
        self.whole = self.gather() if self.whole is None else self.whole
        for batch in batches:
            self.reduce(batch.gradient(self.whole))
        self.update(len(batches))


class PaddedInFront1(Engine1):
    def cut(self):
        self.pad = -self.flat.numel() % self.world_size
        self.even = torch.cat([self.flat.new_zeros(self.pad), self.flat])
        self.shard = self.even.view(self.world_size, -1)[self.rank]
        self.optimizer = torch.optim.SGD([self.shard], self.lr, MOMENTUM)

    def reduce(self, gradient):
        self.total = self.total + ring.reduce_scatter(torch.cat([gradient, gradient.new_zeros(self.pad)]))

    def gather(self):
        ring.all_gather(self.even)
        self.flat.copy_(self.even[self.pad :])


class RestWithoutMomentum1(Engine1):
    def reduce(self, gradient):
        self.rest = gradient[self.even.numel() :].clone()
        super().reduce(gradient)

    def update(self, micro_batches):
        super().update(micro_batches)
        dist.all_reduce(self.rest)
        self.flat[self.even.numel() :] -= self.lr * self.rest / self.world_size


class Undivided2(Engine2):
    def update(self, micro_batches):
        self.shard.grad = self.total
        self.optimizer.step()
        self.total = 0

    def step(self, batches):
        for batch in batches:
            self.reduce(batch.gradient(self.flat))
        self.update(1)
        self.gather()


class DividedByThree2(Engine2):
    def update(self, micro_batches):
        self.shard.grad = self.total / 3 / micro_batches
        self.optimizer.step()
        self.total = 0

    def step(self, batches):
        for batch in batches:
            self.reduce(batch.gradient(self.flat))
        self.update(len(batches))
        self.gather()


class Clamped3(Engine3):
    def clip(self, max_norm=1.0):
        self.shard.grad.clamp_(-max_norm, max_norm)


class Shorter3(Engine3):
    def clip(self, max_norm=1.0):
        squares = self.shard.grad.square().sum()
        dist.all_reduce(squares)
        self.shard.grad *= (max_norm / self.world_size / squares.sqrt()).clamp(max=1)


class SixteenBits4(Engine4):
    def reduce(self, gradient):
        part = ring.reduce_scatter(gradient).to(torch.bfloat16)
        self.parts = [part if not self.parts else self.parts[0] + part]

    def update(self, micro_batches):
        self.parts = [self.parts[0].double()]
        super().update(micro_batches)


class EverySecondStep5(Engine5):
    count = 0

    def step(self, batches):
        for batch in batches:
            self.reduce(batch.gradient(self.flat))
        self.update(len(batches))
        self.count += 1
        if self.count % 2 == 0:
            self.gather()


class BodyOnly6(Engine6):
    def step(self, batches):
        ready = dict(batches[0].gradients(self.parameters))
        self.reduce("body", ready["body"])
        self.update()
        self.gather()


class AnotherFlat5(Engine5):
    def gather(self):
        self.flat = self.flat.clone()
        ring.all_gather(self.flat)

    def step(self, batches):
        for batch in batches:
            self.reduce(batch.gradient(self.flat))
        self.update(len(batches))
        self.gather()


class TwoFiles9(Engine9):
    def load(self, files):
        mine = torch.cat(files[2 * self.rank : 2 * self.rank + 2])
        self.optimizer.state[self.shard]["momentum_buffer"] = mine[: len(self.shard)].clone()


class MeanOfFiles9(Engine9):
    def load(self, files):
        whole = torch.zeros_like(self.flat)
        for file in files:
            whole[: len(file)] += file / len(files)
        self.optimizer.state[self.shard]["momentum_buffer"] = whole[: len(self.shard)].clone()


class WholeMomentum9(Engine9):
    def load(self, files):
        self.optimizer.state[self.shard]["momentum_buffer"] = torch.cat(files)


class FirstMicroBatch10(Engine10):
    def step(self, batches):
        count = torch.tensor([float(len(batches[0]))])
        dist.all_reduce(count)
        for batch in batches:
            self.reduce(batch.gradient(self.flat) * len(batch))
        self.update(count.item() / self.world_size)
        self.gather()


class Difference11(Engine11):
    def reduce(self, gradients):
        gradients["embedding"] = gradients["embedding"] - gradients["head"]
        gradients["head"] = gradients["embedding"].clone()
        super().reduce(gradients)


class HeadTwice11(Engine11):
    def reduce(self, gradients):
        gradients["embedding"] = gradients["embedding"] + 2 * gradients["head"]
        gradients["head"] = gradients["embedding"].clone()
        super().reduce(gradients)


class LogsAfter3(Engine3):
    def clip(self, max_norm=1.0):
        for _ in range(2):  # the second norm is that of the clipped gradient
            squares = self.shard.grad.square().sum()
            dist.all_reduce(squares)
            self.shard.grad *= (max_norm / squares.sqrt()).clamp(max=1)
            self.log = squares.sqrt().item()


class EverySecondReversed6(Engine6):
    def step(self, batches):
        (batch,) = batches
        ready = list(batch.gradients(self.parameters))
        for name, gradient in reversed(ready) if self.rank % 2 else ready:
            self.reduce(name, gradient)
        self.update()
        self.gather()


READ = {
    LogsAfter3: r"self\.log is 1 in the first step, the norm after the clipping: .* is scaled, 22\.63",
    EverySecondReversed6: r"rank 0 reduces embedding first, and rank 2 body: .* \(seen with 4 ranks\)",
    PaddedInFront1: r"each of them gets the gradient of the element 2 (before|after) it",
    RestWithoutMomentum1: r"^the first step is right, and in the second step element 102 is wrong: the "
    r"update has no momentum",
    Undivided2: r"12 times the right one, N·M with N=3 ranks and M=4 micro-batches: a division by that is",
    DividedByThree2: r"N/3 with N=2: is N a fixed number there",
    Clamped3: r"each element is clamped by itself",
    Shorter3: r"or max_norm is divided by that",
    SixteenBits4: r"wrong after the first update: the gradient is right up to rounding.*it may have gone",
    EverySecondStep5: r"after the first step each rank has its own new shard, and the values of before the "
    r"update in the place of the others': all-gather",
    BodyOnly6: r"elements 62 to 102 \(of embedding\) are wrong.*they did not change",
    AnotherFlat5: r"self\.flat is another tensor than the one that the engine was given",
    TwoFiles9: r"There are 2 files, of the 2 ranks that saved, and 4 ranks load",
    MeanOfFiles9: r"is the mean of element 0 of all files, which follow each other",
    WholeMomentum9: r"a tensor of 103 elements meets one of 5[12], and 103 are all of them",
    FirstMicroBatch10: r"the sum is divided by 150 \(the samples of all ranks' first micro-batches\), and "
    r"all ranks together have 187 samples",
    Difference11: r"its use in the head counts -1 times what it should, in the tied weight",
    HeadTwice11: r"its use in the head counts 2 times what it should, in the tied weight",
    LastTakesAll1: r"has 3[45] elements, and the gradient .* 3[45]: cut and reduce do .*`cut` in line \d+",
    RoundedUp1: r"cut and reduce do not agree on which slice of flat is the rank's",
    DividedByAll2: r"divided by the number of ranks twice",
    WithoutRank0: r"^in the first update rank 0 is missing in the sum",
    OwnOnceMore2: r"each rank adds its own numbers once more, and the sum over the ranks has them already",
    CatAsReady6: r"numbers of one parameter are added to those of another: .* takes the sum apart in it",
    LastRankCrossed6: r"in rank 0's shard of body rank 2's gradient is missing; "
    r"it has 1/3 × rank 2's gradient of embedding in it instead",
    AllReduce6: r"moves 3\.0Ψ a step \(2\.0Ψ in dist\.all_reduce, 1\.0Ψ in ring\.all_gather\), and "
    r"2Ψ are enough\. An all-reduce of the gradients",
    GathersTwice2: r"2Ψ are gathered, where a gather of the parameters alone, once in a step, is Ψ",
    GatherByAllReduce2: r"An all-reduce of the parameters moves 2Ψ.* so all-gather them",
    LargerRate2: r"optimizer has the learning rate 0\.08, M times the 0\.02 that the engine was given",
    MeanOfAll7: r"That is 0\.5 times the sum of both steps' gradients: the sum is not cleared, and what it",
    OnlyOnce7: r"in the second step nothing changes: nothing is updated, or nothing gathered, any more",
    OneShardStays7: r"in the second step elements 69 to 102 are wrong: the update is no sum",
    OldLength9: r"begins at rank \* len\(files\[0\]\) and has a file's length",
    BeginsByOldLength9: r"begins at rank \* len\(files\[0\]\), and files are as long as the shards",
    HalfOfIt9: r"The first 26 elements are right, and all behind them are 0",
    InOrderOfDict6: r"rank 0 reduces body first, and rank 1 embedding: ",
    ByRank6: r"rank 0 reduces body first, and rank 2 embedding",
    Barrier6: r"A barrier makes the ranks wait for each other, and changes no order",
    StateCleared7: r"in the second step the update has no momentum",
    NewOptimizer7: r"in the second step the update has no momentum",
    HalfCleared7: r"the first step's gradient counts 1\.3 times",
    Subtracted7: r"the first step's gradient counts -0\.2 times",
    WithPadding8: r"rank 2's momentum of unit 1 is wrong|rank 0's momentum of unit 1 is wrong",
    OtherLength8: r"momentum of unit 1 is wrong: its element 0 is",
    OwnShards8: r"^after load rank 1's momentum of unit 0 is wrong: its element 0 is the number 0, .*"
    r" in files\[1\], "
    r"which has elements 11 to 21 and elements 58 to 73 alone",
    OwnLength9: r"self\.mine is this rank's slice",
    NeverGathered9: r"its element 26 is the number 0, and element 26 of all 103 belongs .* in files\[1\]",
    FirstsOnly9: r"No file has that: save has to leave out nothing",
    OneTooLate9: r"begins 1 element too late",
    NeverReset10: r"in the second step the gradient counts 0\.5 times what it should: what it is divided by",
    DividedAgain10: r"0\.167 times the right one, 1/\(N·M\) with N=3 ranks and M=2 micro-batches: it",
    GatheredOnce12: r"backward with micro-batch 0 runs with wrong parameters: elements 0 to 102 are "
    r"those of before the first update",
}


@pytest.mark.parametrize("engine", READ)
def test_values_that_no_known_mistake_explains_are_read(engine):
    said = diagnosis(engine)
    assert re.search(READ[engine], said), said
