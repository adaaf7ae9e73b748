"""Lesson 09, tickets 8 to 12: a wrong load, weight or memory is named by what the ranks have."""

import pytest
import torch
import torch.distributed as dist
from support.lessons import solutions_travel_by_value
from support.tickets import diagnosis

from zerolab import ring
from zerolab.course.lessons.incident_room import (
    MOMENTUM,
    Engine8,
    Engine9,
    Engine10,
    Engine11,
    Engine12,
)

solutions_travel_by_value(__name__)


class PaddingInFront8(Engine8):
    def save(self):
        return [self.momentum(place)[: len(unit)] for place, unit in enumerate(self.units)]

    def load(self, files):
        for shard, padded, saved in zip(self.shards, self.padded, files[self.rank], strict=True):
            whole = torch.zeros_like(padded)
            whole[-len(saved) :] = saved
            self.optimizer.state[shard]["momentum_buffer"] = self.own(whole).clone()


class ShardOfRank0(Engine8):
    def save(self):
        return [self.momentum(place)[: len(unit)] for place, unit in enumerate(self.units)]

    def load(self, files):
        for shard, padded, saved in zip(self.shards, self.padded, files[0], strict=True):
            whole = torch.zeros_like(padded)
            whole[: len(saved)] = saved
            self.optimizer.state[shard]["momentum_buffer"] = whole[: len(shard)].clone()


class RemainderLost9(Engine9):
    def load(self, files):
        whole = torch.cat(list(files))
        size = len(whole) // self.world_size
        momentum = torch.zeros_like(self.shard)
        momentum[:size] = whole[self.rank * size : (self.rank + 1) * size]
        self.optimizer.state[self.shard]["momentum_buffer"] = momentum


class CopiesAddedUp9(Engine9):
    def save(self):
        whole = torch.zeros_like(self.flat)
        whole[self.mine] = self.optimizer.state[self.shard]["momentum_buffer"]
        ring.all_gather(whole)
        return whole

    def load(self, files):
        whole = torch.cat(list(files)).view(len(files), -1).sum(0)
        self.optimizer.state[self.shard]["momentum_buffer"] = whole[self.mine].clone()


class IntoTheShard9(Engine9):
    def load(self, files):
        whole = torch.cat(list(files))
        self.shard.copy_(whole[self.mine])


class NotMultiplied10(Engine10):
    def step(self, batches):
        count = torch.tensor([float(sum(len(batch) for batch in batches))])
        for batch in batches:
            self.reduce(batch.gradient(self.flat))
        dist.all_reduce(count)
        self.shard.grad = self.total / count.item()
        self.optimizer.step()
        self.total = 0
        self.gather()


class AfterTheReduction10(Engine10):
    def step(self, batches):
        count = torch.tensor([float(sum(len(batch) for batch in batches))])
        dist.all_reduce(count)
        for batch in batches:
            before = self.total
            self.reduce(batch.gradient(self.flat))
            self.total = before + (self.total - before) * len(batch)
        self.shard.grad = self.total / count.item()
        self.optimizer.step()
        self.total = 0
        self.gather()


class OverTheLargest10(Engine10):
    def step(self, batches):
        largest = max(len(batch) for batch in batches)
        for batch in batches:
            self.reduce(batch.gradient(self.flat) * len(batch) / largest)
        self.update(len(batches))
        self.gather()


class WholeNumbers10(Engine10):
    def step(self, batches):
        count = torch.tensor([sum(len(batch) for batch in batches)])
        for batch in batches:
            self.reduce(batch.gradient(self.flat) * len(batch))
        dist.all_reduce(count)
        self.shard.grad = self.total // count
        self.optimizer.step()
        self.total = 0
        self.gather()


class ZerosForTheHead11(Engine11):
    def reduce(self, gradients):
        both = gradients["embedding"] + gradients["head"]
        super().reduce({**gradients, "embedding": both, "head": torch.zeros_like(both)})


class ReducedByName11(Engine11):
    def cut(self):
        self.first, unique = {}, {}
        for name, parameter in self.parameters.items():
            self.first[name] = next((n for n, p in unique.items() if p is parameter), name)
            unique.setdefault(self.first[name], parameter)
        self.flat = torch.cat(list(unique.values()))
        sizes = [parameter.numel() for parameter in unique.values()]
        self.spans = dict(zip(unique, self.flat.split(sizes), strict=True))
        mine = ring.chunks(self.flat.numel(), self.world_size)[self.rank]
        self.shard = self.flat[mine]
        self.optimizer = torch.optim.SGD([self.shard], self.lr, MOMENTUM)

    def reduce(self, gradients):
        total = 0
        for name, gradient in gradients.items():
            parts = {n: torch.zeros_like(s) for n, s in self.spans.items()} | {self.first[name]: gradient}
            whole = torch.cat(list(parts.values()))
            total = total + ring.reduce_scatter(whole)
        self.shard.grad = total / self.world_size


class NoForward12(Engine12):
    def step(self, batches):
        whole = self.gather()
        for batch in batches:
            self.reduce(batch.gradient(whole))
        del whole
        self.update(len(batches))


class KeepsAView12(Engine12):
    def reduce(self, gradient):
        mine = ring.reduce_scatter(gradient)
        if isinstance(self.total, int):
            self.total = mine
        else:
            self.total += mine

    def step(self, batches):
        whole = self.gather()
        for batch in batches:
            self.loss = batch.loss(whole)
            self.reduce(batch.gradient(whole))
        del whole
        self.update(len(batches))


class Broadcast12(Engine12):
    def gather(self):
        whole = self.shard.new_zeros(self.numel)
        whole[self.mine] = self.shard
        dist.broadcast(whole, src=0)
        return whole

    def step(self, batches):
        whole = self.gather()
        for batch in batches:
            self.loss = batch.loss(whole)
            self.reduce(batch.gradient(whole))
        del whole
        self.update(len(batches))


class GathersEachAndReducesOnce12(Engine12):
    def step(self, batches):
        total = 0
        for batch in batches:
            whole = self.gather()
            self.loss = batch.loss(whole)
            total = total + batch.gradient(whole)
        self.reduce(total)
        self.update(len(batches))


class ReducesTwo12(Engine12):
    """Reduces the gradients of two micro-batches at once, and gathers for both."""

    def step(self, batches):
        for first in range(0, len(batches), 2):
            whole, total = self.gather(), 0
            for batch in batches[first : first + 2]:
                self.loss = batch.loss(whole)
                total = total + batch.gradient(whole)
            self.reduce(total)
        self.update(len(batches))


SAID = {
    PaddingInFront8: "the unit's padding, 2 zeros, stands before its momentum. Padding is at the end",
    ShardOfRank0: "every rank has that of rank 0's shard. Take the slice that this rank owns",
    RemainderLost9: "each rank takes (numel // N) elements from element rank * (numel // N) on, of all files",
    CopiesAddedUp9: "4 times the one that was saved, on all ranks: each of the 4 files has all of it, and",
    IntoTheShard9: "load writes the momentum into rank 0's parameters, from element 0 on",
    NotMultiplied10: "no gradient is multiplied by its samples (batch.gradient is a mean), and the sum is",
    AfterTheReduction10: "the owner multiplies by the samples of its own micro-batch, and the sum is divided",
    OverTheLargest10: "divided by the samples of its rank's first micro-batch, which is the largest, and the",
    WholeNumbers10: "the gradient is rounded to whole numbers: divide with / and keep the floating-point",
    ZerosForTheHead11: "the tied weight stands in flat twice: the copy that was not updated is written over",
    ReducedByName11: "3.0Ψ are reduced, where 1Ψ are the gradients of each micro-batch once. Add up what",
    NoForward12: "runs 0 forwards in 3 steps of 4 micro-batches: batch.loss(whole) is the forward",
    KeepsAView12: "before micro-batch 1 rank 0 keeps a whole gradient alive, in `self.total`: a view of one,",
    GathersEachAndReducesOnce12: "a step moves only 5Ψ, but 4Ψ of that are gathers: whole gradients are "
    "accumulated and reduced once. There is no room to keep a whole gradient from one micro-batch to the "
    "next: gather once",
    ReducesTwo12: "moves only 4Ψ: whole gradients are accumulated and reduced 2 times for 4 micro-batches",
    Broadcast12: "backward with micro-batch 0 runs with wrong parameters: elements 35 to 102 are 0, and were",
}


@pytest.mark.parametrize("engine", SAID)
def test_what_a_wrong_repair_does_is_named(engine):
    assert SAID[engine] in diagnosis(engine)
