"""Lesson 09, tickets 1 to 7: a wrong update is read by the gradients and the momentum in it."""

import pytest
import torch
import torch.distributed as dist
from support.lessons import solutions_travel_by_value
from support.tickets import diagnosis

import zerolab
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
    Engine9,
    Engine10,
    Engine12,
)
from zerolab.course.lessons.incident_room.room import NAMES
from zerolab.course.lessons.incident_room.tickets.ticket_12 import Repaired as Repaired12

solutions_travel_by_value(__name__)


class TailOnEachRank1(Engine1):
    def cut(self):
        super().cut()
        self.tail = self.flat[self.even.numel() :]
        self.tail_optimizer = torch.optim.SGD([self.tail], self.lr, MOMENTUM)
        self.tail_total = 0

    def reduce(self, gradient):
        super().reduce(gradient)
        tail = gradient[self.even.numel() :].clone()
        dist.all_reduce(tail)
        self.tail_total = self.tail_total + tail

    def update(self, micro_batches):
        self.tail.grad = self.tail_total / (self.world_size * micro_batches)
        self.tail_optimizer.step()
        self.tail_total = 0
        super().update(micro_batches)


class LastTakesTheRest1(Engine1):
    def cut(self):
        size, last = self.flat.numel() // self.world_size, self.world_size - 1
        stops = [(rank + 1) * size if rank < last else self.flat.numel() for rank in range(last + 1)]
        self.cuts = [slice(rank * size, stop) for rank, stop in enumerate(stops)]
        self.shard = self.flat[self.cuts[self.rank]]
        self.optimizer = torch.optim.SGD([self.shard], self.lr, MOMENTUM)

    def reduce(self, gradient):
        for rank, cut in enumerate(self.cuts):
            dist.reduce(gradient[cut], rank)
        self.total = self.total + gradient[self.cuts[self.rank]]

    def gather(self):
        for rank, cut in enumerate(self.cuts):
            dist.broadcast(self.flat[cut], rank)


class LastMicroBatch1(Engine1):
    def cut(self):
        mine = ring.chunks(self.flat.numel(), self.world_size)[self.rank]
        self.shard = self.flat[mine]
        self.optimizer = torch.optim.SGD([self.shard], self.lr, MOMENTUM)

    def reduce(self, gradient):
        self.total = ring.reduce_scatter(gradient)

    def gather(self):
        ring.all_gather(self.flat)


class TrainsWithTheSum9(Engine9):
    def reduce(self, gradient):
        self.shard.grad = ring.reduce_scatter(gradient)

    def load(self, files):
        self.optimizer.state[self.shard]["momentum_buffer"] = torch.cat(files)[self.mine].clone()


class ViewOfAllFiles9(Engine9):
    def load(self, files):
        self.optimizer.state[self.shard]["momentum_buffer"] = torch.cat(files)[self.mine]


class KeepsItWhole9(Engine9):
    def load(self, files):
        self.saved = torch.cat(files)
        self.optimizer.state[self.shard]["momentum_buffer"] = self.saved[self.mine].clone()


class KeepsTheFiles9(Engine9):
    def load(self, files):
        self.files = files
        self.optimizer.state[self.shard]["momentum_buffer"] = torch.cat(files)[self.mine].clone()


class Float32Momentum9(Engine9):
    def load(self, files):
        momentum = torch.zeros(self.flat.numel())
        momentum[:] = torch.cat(files)
        self.optimizer.state[self.shard]["momentum_buffer"] = momentum[self.mine].clone()


class ZerosAroundTheSlice9(Engine9):
    def save(self):
        whole = torch.zeros_like(self.flat)
        whole[self.mine] = self.optimizer.state[self.shard]["momentum_buffer"]
        return whole

    def load(self, files):
        whole = torch.stack(files).sum(dim=0)
        self.optimizer.state[self.shard]["momentum_buffer"] = whole[self.mine].clone()


class NoStep12(Engine12):
    def step(self, batches): ...


class KeepsTheGivenFlat12(Engine12):
    """Sends what is right, and keeps the tensor that it was given."""

    def cut(self, flat):
        super().cut(flat)
        self.flat = flat

    step = Repaired12.step


class ShardIsAView12(Engine12):
    def cut(self, flat):
        self.mine = ring.chunks(self.numel, self.world_size)[self.rank]
        self.shard = flat[self.mine]
        self.optimizer = torch.optim.SGD([self.shard], self.lr, MOMENTUM)

    step = Repaired12.step


def updates_each(divisor):
    """A step that gathers once and updates after each micro-batch."""

    def step(self, batches):
        whole = self.gather()
        for batch in batches:
            self.loss = batch.loss(whole)
            self.reduce(batch.gradient(whole))
            self.update(divisor(batches))

    return step


class UpdatesUnseen12(Engine12):
    step = updates_each(len)


class WholeUpdatesUnseen12(Engine12):
    step = updates_each(lambda batches: 1)


class ClearedToANumber7(Engine7):
    def update(self, micro_batches):
        self.total = 0
        super().update(micro_batches)


class DividedByItsOwn10(Engine10):
    """Each owner divides by its own number of samples."""

    def step(self, batches):
        own = sum(map(len, batches))
        for batch in batches:
            self.total = self.total + ring.reduce_scatter(batch.gradient(self.flat) * len(batch))
        self.shard.grad = self.total / own
        self.optimizer.step()
        self.total = 0
        ring.all_gather(self.flat)


class OtherRate2(Engine2):
    def step(self, batches):
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * len(batches) ** 0.5
        super().step(batches)


class RateGrows2(Engine2):
    def step(self, batches):
        for group in self.optimizer.param_groups:
            group["lr"] *= len(batches)
        super().step(batches)


class Multiplied2(Engine2):
    def step(self, batches):
        for batch in batches:
            self.reduce(batch.gradient(self.flat) * len(batches))
        self.update(len(batches))
        self.gather()


class LastMicroBatch2(Engine2):
    def reduce(self, gradient):
        self.total = ring.reduce_scatter(gradient).clone()

    def update(self, micro_batches):
        self.shard.grad = self.total * micro_batches / self.world_size
        self.optimizer.step()
        self.total = 0


class EachMicroBatch3(Engine3):
    def clip(self, max_norm=1.0):
        pass

    def reduce(self, gradient):
        mine = ring.reduce_scatter(gradient) / self.world_size
        square = mine.square().sum()
        dist.all_reduce(square)
        norm = square.sqrt()
        self.log = norm.item()
        self.total = self.total + self.world_size * mine * (1 / norm).clamp(max=1)


class OnlyLongOnes3(Engine3):
    def clip(self, max_norm=1.0):
        norm = self.shard.grad.norm()
        if norm > max_norm:
            square = norm.square()
            dist.all_reduce(square)
            norm = square.sqrt()
            self.shard.grad *= max_norm / norm
        self.log = norm.item()


class LastMicroBatch3(Engine3):
    def reduce(self, gradient):
        self.total = ring.reduce_scatter(gradient)

    def clip(self, max_norm=1.0):
        square = self.shard.grad.square().sum()
        dist.all_reduce(square)
        norm = square.sqrt()
        self.shard.grad *= (max_norm / norm).clamp(max=1)
        self.log = norm.item()


class GradNeverCleared4(Engine4):
    def reduce(self, gradient):
        part = ring.reduce_scatter(gradient)
        self.shard.grad = part.clone() if self.shard.grad is None else self.shard.grad + part

    def update(self, micro_batches):
        self.shard.grad /= self.world_size * micro_batches
        self.optimizer.step()


class AddedUp5(Engine5):
    def step(self, batches):
        for batch in batches:
            self.reduce(batch.gradient(self.flat))
        self.update(len(batches))
        ring.all_reduce(self.flat)


class LastMicroBatch5(Engine5):
    def reduce(self, gradient):
        self.total = ring.reduce_scatter(gradient)

    def step(self, batches):
        for batch in batches:
            self.reduce(batch.gradient(self.flat))
        self.update(len(batches))
        self.gather()


class CutAsOne6(Engine6):
    def step(self, batches):
        (batch,) = batches
        ready = dict(batch.gradients(self.parameters))
        mine = ring.reduce_scatter(torch.cat([ready[name] for name in self.parameters])) / self.world_size
        at = 0
        for shard in self.shards.values():
            part = mine[at : at + len(shard)]
            shard.grad = torch.cat([part, part.new_zeros(len(shard) - len(part))])
            at += len(shard)
        self.update()
        self.gather()


class LeftOut6(Engine6):
    def step(self, batches):
        (batch,) = batches
        for name, (ready, gradient) in zip(self.parameters, batch.gradients(self.parameters), strict=True):
            if name == ready:
                self.reduce(name, gradient)
        self.update()
        self.gather()


class InTheirPlace6(Engine6):
    def step(self, batches):
        (batch,) = batches
        ready = [gradient for _, gradient in batch.gradients(self.parameters)]
        ready.sort(key=len)
        for name, gradient in zip(self.parameters, ready, strict=True):
            self.reduce(name, gradient)
        self.update()
        self.gather()


class OfASet6(Engine6):
    def step(self, batches):
        (batch,) = batches
        ready = dict(batch.gradients(self.parameters))
        for name in set(ready):
            self.reduce(name, ready[name])
        self.update()
        self.gather()


class ByHash6(Engine6):
    def step(self, batches):
        (batch,) = batches
        ready = dict(batch.gradients(self.parameters))
        for name in sorted(ready, key=hash):
            self.reduce(name, ready[name])
        self.update()
        self.gather()


class ClearedBefore7(Engine7):
    def update(self, micro_batches):
        self.total = 0 * self.total
        super().update(micro_batches)


class LastTakenAway7(Engine7):
    def reduce(self, gradient):
        self.last = ring.reduce_scatter(gradient)
        self.total = self.total + self.last

    def update(self, micro_batches):
        super().update(micro_batches)
        self.total = self.total - self.last


class Clipped7(Engine7):
    def update(self, micro_batches):
        self.shard.grad = self.total / (self.world_size * micro_batches)
        self.log = self.shard.grad.norm().item()
        self.shard.grad *= min(1, 10 / self.log)
        self.optimizer.step()
        self.optimizer.zero_grad()


OF_HASHES = "the order of the reductions comes from a set or from hash(): where PYTHONHASHSEED is"
SAID = {
    TrainsWithTheSum9: "wrong before the resume already: the mistake is in the training step, and not in",
    ViewOfAllFiles9: "momentum is a view of a tensor of 103 elements, and keeps all of it in memory",
    KeepsItWhole9: "the momentum and of the gradient have 832: `self.saved` has 824 of them",
    KeepsTheFiles9: "after the resume rank 0 keeps 1,656 bytes, where its slices of the momentum and of the",
    Float32Momentum9: "is float32, and the parameters are float64. torch.tensor and torch.zeros make float32",
    KeepsTheGivenFlat12: "keeps whole parameters, in `self.flat`: at stage 3 only shards are left between",
    ShardIsAView12: "in `self.shard`: at stage 3 only shards are left between two steps. A view of",
    UpdatesUnseen12: "each micro-batch has an update of its own, which the next one does not see: add the",
    WholeUpdatesUnseen12: "an update of its own, with its whole gradient, and the next one does not see it",
    ZerosAroundTheSlice9: "the 4 files have 412 elements together, and the momentum has 103: a rank's file",
    NoStep12: "no rank computed a gradient: step calls batch.gradient for none of its micro",
    ClearedToANumber7: "The sum of the gradients is a number here, and no tensor: either nothing was added",
    DividedByItsOwn10: "and nothing else divides the sum. Multiply each gradient by",
    LastTakesTheRest1: "the shards are uneven: rank 3 has one of 28 elements, and the smallest has 25. The",
    TailOnEachRank1: "rank 0 holds 28 elements of momentum, and its share is 26",
    LastMicroBatch1: "only the last micro-batch counts: add them all up",
    OtherRate2: "The learning rate is 2 times the given one, and the gradient 0.25 (1/M) times what it",
    RateGrows2: "in the second step rank 0's optimizer has another learning rate: it changes from step to",
    Multiplied2: "of the divisions by M one has to stay, and nothing may multiply by M",
    LastMicroBatch2: "in the first update only the last micro-batch counts, and 4 (M) times what it should",
    EachMicroBatch3: "by 1 over the norm of each micro-batch's mean gradient by itself: clip the mean of all",
    OnlyLongOnes3: "Here they exchange no number: all ranks have to take part in the all-reduce",
    LastMicroBatch3: "in the first update only the last micro-batch counts",
    GradNeverCleared4: "0.0833 of it, divided by N·M once more, is left over in what the second step adds",
    AddedUp5: "3 times the old ones plus 1 times the update: the ranks' whole parameters are added up",
    LastMicroBatch5: "only the last micro-batch counts: add them all up",
    CutAsOne6: "What is reduced is cut at other places than the shards, which are cut of each parameter by",
    LeftOut6: "reduces nothing: it is in ring.all_gather already. Every rank takes part in the reduction of",
    InTheirPlace6: "as many as that of embedding has: keep each gradient with its name",
    ByHash6: OF_HASHES,
    ClearedBefore7: "they took their steps with gradients of 0. Is the sum of the gradients cleared before",
    LastTakenAway7: "the first step's micro-batches 0 and 1 are still in the sum, 1 times: clear all of the",
    Clipped7: "scaled to a norm of 10 at most, as clipping does, by the norm of its own shard. Its length is",
}


@pytest.mark.parametrize("engine", SAID)
def test_what_a_wrong_repair_does_is_named(engine):
    assert SAID[engine] in diagnosis(engine)


def set_keeps_the_order_of_adding() -> bool:
    """On a rank: whether the names have the same place in a set's table, which their hashes decide."""
    return list(set(dict.fromkeys(NAMES))) != list(set(dict.fromkeys(reversed(NAMES))))


def test_an_order_of_a_set_is_named():
    """Where it is that in which the names were added, it differs from rank to rank already here."""
    (by_adding,) = zerolab.launch(set_keeps_the_order_of_adding, 1)
    added = "The gradients get ready, and come out of a dict, in an order that differs from rank to rank"
    assert (added if by_adding else OF_HASHES) in diagnosis(OfASet6)


class AsTorchClips3(Engine3):
    def clip(self, max_norm=1.0):
        square = self.shard.grad.square().sum()
        dist.all_reduce(square)
        norm = square.sqrt()
        self.shard.grad *= (max_norm / (norm + 1e-6)).clamp(max=1)
        self.log = norm.item()


def test_a_clip_as_pytorch_computes_it_is_right():
    assert diagnosis(AsTorchClips3) is None
