"""Lesson 04: its check names each classic mistake, memory and bytes too; its drawings tell the truth."""

import copy
import importlib
import re

import pytest
import torch
import torch.distributed as dist
from support.answers import alone, together
from support.lessons import solutions_travel_by_value, spoken
from torch import nn

import zerolab
from zerolab import ring
from zerolab.course.attempts import attempt
from zerolab.course.lessons.zero_stage_1 import check_zero1, figures
from zerolab.course.messages import sent_bytes
from zerolab.course.targets import Reached

solutions_travel_by_value(__name__)


class Right:
    """Stage 1 as it should be; each subclass below makes one classic mistake."""

    def __init__(self, flat, optimizer_class, lr):
        self.flat, self.n = flat, dist.get_world_size()
        self.optimizer_class, self.lr = optimizer_class, lr
        self.piece = self.cut()
        self.shard = self.flat[self.piece]
        self.optimizer = optimizer_class([self.shard], lr=lr)

    def cut(self):
        return ring.chunks(self.flat.numel(), self.n)[dist.get_rank()]

    def reduce(self, gradient):
        return ring.reduce_scatter(gradient) / self.n

    def step(self, gradient):
        self.shard.grad = self.reduce(gradient)
        self.optimizer.step()
        self.share()

    def share(self):
        ring.all_gather(self.flat)


class Stub(Right):
    def step(self, gradient): ...


class NoGather(Right):
    def share(self): ...


class NeverCommunicates(NoGather):
    def reduce(self, gradient):
        return gradient[self.piece]


class OwnGradient(Right):
    def reduce(self, gradient):
        return gradient[self.piece]


class Sum(Right):
    def reduce(self, gradient):
        return ring.reduce_scatter(gradient).clone()


class ThreePsi(Right):
    def reduce(self, gradient):
        ring.all_reduce(gradient)
        return gradient[self.piece] / self.n


class NativeThreePsi(Right):
    def reduce(self, gradient):
        dist.all_reduce(gradient)
        return gradient[self.piece] / self.n


class Remainder(Right):
    def cut(self):
        size = self.flat.numel() // self.n
        return slice(size * dist.get_rank(), size * (dist.get_rank() + 1))

    def reduce(self, gradient):
        self.even = self.flat[: self.flat.numel() // self.n * self.n]
        return ring.reduce_scatter(gradient[: self.even.numel()]) / self.n

    def share(self):
        ring.all_gather(self.even)


class Forgetful(Right):
    def step(self, gradient):
        self.optimizer = self.optimizer_class([self.shard], lr=self.lr)
        super().step(gradient)


class CopiedShard(Right):
    def __init__(self, flat, optimizer_class, lr):
        super().__init__(flat, optimizer_class, lr)
        self.shard = self.shard.clone()
        self.optimizer = optimizer_class([self.shard], lr=lr)


class Unsharded:
    """Plain data parallelism, which a grader of values would pass."""

    def __init__(self, flat, optimizer_class, lr):
        self.flat, self.optimizer = flat, optimizer_class([flat], lr=lr)

    def step(self, gradient):
        dist.all_reduce(gradient)
        self.flat.grad = gradient / dist.get_world_size()
        self.optimizer.step()


class WholeStateOwnShard(Right):
    """The optimizer is given everything, and a gradient that is zero outside the shard."""

    def __init__(self, flat, optimizer_class, lr):
        super().__init__(flat, optimizer_class, lr)
        self.optimizer = optimizer_class([flat], lr=lr)

    def step(self, gradient):
        own = self.reduce(gradient)
        self.flat.grad = torch.zeros_like(self.flat)
        self.flat.grad[self.piece] = own
        self.optimizer.step()
        self.share()


class Padded(Right):
    """Another right way: pad, and use torch's own collectives, which want equal shards."""

    def __init__(self, flat, optimizer_class, lr):
        self.n, self.flat = dist.get_world_size(), flat
        self.size = -(-flat.numel() // self.n)
        self.padded = torch.cat([flat, flat.new_zeros(self.size * self.n - flat.numel())])
        own = self.size * dist.get_rank()
        self.shard = self.padded[own : own + self.size]
        self.optimizer = optimizer_class([self.shard], lr=lr)

    def reduce(self, gradient):
        padded = torch.cat([gradient, gradient.new_zeros(self.padded.numel() - gradient.numel())])
        mine = gradient.new_empty(self.size)
        dist.reduce_scatter(mine, list(padded.split(self.size)))
        return mine / self.n

    def share(self):
        rows = list(self.padded.split(self.size))
        dist.all_gather(rows, self.shard.clone())
        self.flat.copy_(self.padded[: self.flat.numel()])


class CopiesBack:
    """Right: a master copy of the shard, copied back into flat; the gradient comes in messages to owners."""

    def __init__(self, flat, optimizer_class, lr):
        self.rank, self.n, self.flat = dist.get_rank(), dist.get_world_size(), flat
        self.cuts = ring.chunks(flat.numel(), self.n)
        self.master = torch.nn.Parameter(flat[self.cuts[self.rank]].detach().clone())
        self.optimizer = optimizer_class([{"params": [self.master]}], lr=lr)

    def step(self, gradient):
        mine = gradient[self.cuts[self.rank]].clone()
        for distance in range(1, self.n):
            landing = torch.empty_like(mine)
            there, origin = (self.rank + distance) % self.n, (self.rank - distance) % self.n
            work = dist.isend(gradient[self.cuts[there]].contiguous(), there)
            dist.recv(landing, origin)
            work.wait()
            mine += landing
        self.optimizer.zero_grad()
        self.master.grad = mine.div(self.n)
        self.optimizer.step()
        with torch.no_grad():
            self.flat[self.cuts[self.rank]] = self.master
        for owner, cut in enumerate(self.cuts):
            dist.broadcast(self.flat[cut], owner)


class GathersFirst(Right):
    def step(self, gradient):
        self.share()
        self.shard.grad = self.reduce(gradient)
        self.optimizer.step()


class PilesUp(Right):
    def reduce(self, gradient):
        before = 0 if self.shard.grad is None else self.shard.grad
        return before + super().reduce(gradient)


class AveragesWeights(Right):
    def __init__(self, flat, optimizer_class, lr):
        super().__init__(flat, optimizer_class, lr)
        self.optimizer = optimizer_class([flat], lr=lr)

    def step(self, gradient):
        self.flat.grad = gradient
        self.optimizer.step()
        ring.all_reduce(self.flat)
        self.flat /= self.n


class AveragesOwnShards(Right):
    """Each rank's shard gets the rank's own gradient, and flat is averaged afterwards."""

    def reduce(self, gradient):
        return gradient[self.piece]

    def share(self):
        ring.all_reduce(self.flat)
        self.flat /= self.n


class AveragesChunks(AveragesOwnShards):
    def share(self):
        mine = ring.reduce_scatter(self.flat)
        mine /= self.n
        ring.all_gather(self.flat)


class StepsTwice(Right):
    def step(self, gradient):
        self.shard.grad = self.reduce(gradient)
        self.optimizer.step()
        super().share()
        self.optimizer.step()
        self.share()


class NextChunk(Right):
    """The gradient of another chunk than that of the shard."""

    def reduce(self, gradient):
        ring.all_reduce(gradient)
        return gradient.roll(-len(self.shard))[self.piece] / self.n


class NoLearningRate(Right):
    def __init__(self, flat, optimizer_class, lr):
        super().__init__(flat, optimizer_class, 1e-3)


class History(Right):
    past = []  # noqa: RUF012

    def step(self, gradient):
        super().step(gradient)
        self.past.append(copy.deepcopy(self.optimizer.state_dict()))


class Rounds(Right):
    def reduce(self, gradient):
        return ring.reduce_scatter(gradient).bfloat16().float() / self.n


class ByHand(Right):
    """An Adam of its own, with m and v in attributes and no optimizer."""

    def __init__(self, flat, optimizer_class, lr):
        super().__init__(flat, optimizer_class, lr)
        self.twin = flat.clone()
        self.lr, self.kind = lr, optimizer_class

    def step(self, gradient):
        optimizer = self.kind([self.shard], lr=self.lr)
        self.shard.grad = self.reduce(gradient)
        optimizer.step()
        self.share()


class NoStep(Right):
    def step(self, gradient):
        self.shard.grad = self.reduce(gradient)
        self.share()


class NoGradient(Right):
    """The gradient belongs to flat, and the optimizer has the shard."""

    def step(self, gradient):
        self.reduce(gradient)
        self.flat.grad = gradient / self.n
        self.optimizer.step()
        self.share()


class NeighboursView(Right):
    def cut(self):
        return ring.chunks(self.flat.numel(), self.n)[(dist.get_rank() + 1) % self.n]


class FirstView(Right):
    def cut(self):
        return ring.chunks(self.flat.numel(), self.n)[0]


class ByTwo(Right):
    def reduce(self, gradient):
        return ring.reduce_scatter(gradient) / 2


class RateTimesRanks(Right):
    def __init__(self, flat, optimizer_class, lr):
        super().__init__(flat, optimizer_class, lr * dist.get_world_size())


class Decays(Right):
    def __init__(self, flat, optimizer_class, lr):
        super().__init__(flat, optimizer_class, lr)
        self.optimizer = optimizer_class([self.shard], lr=lr, weight_decay=0.1)


class AlwaysSGD(Right):
    def __init__(self, flat, optimizer_class, lr):
        super().__init__(flat, torch.optim.SGD, lr)


class TheEngine:
    def __init__(self, flat, optimizer_class, lr):
        self.module = torch.nn.Module()
        self.module.flat = torch.nn.Parameter(flat)
        self.optimizer = zerolab.ZeroOptimizer(self.module, optimizer_class, stage=1, lr=lr)

    def step(self, gradient): ...


class OneStepLate(Right):
    """Each step uses the gradient of the one before, and the first its own."""

    before = None

    def reduce(self, gradient):
        now = super().reduce(gradient).clone()
        late, self.before = now if self.before is None else self.before, now
        return late


class OwnShare(Right):
    def reduce(self, gradient):
        return gradient[self.piece] / self.n


class OwnOnceMore(Right):
    def reduce(self, gradient):
        own = gradient[self.piece].clone()
        return (ring.reduce_scatter(gradient) + own) / self.n


class Backup(Right):
    def __init__(self, flat, optimizer_class, lr):
        super().__init__(flat, optimizer_class, lr)
        self.backup = flat.clone()


class LastCopy(Right):
    """The copy is made in the step, and stays."""

    def step(self, gradient):
        super().step(gradient)
        self.last = self.flat.clone()


class GradientInTheState(Right):
    def step(self, gradient):
        super().step(gradient)
        self.optimizer.state[self.shard]["whole"] = gradient.clone()


class StateBackup(Right):
    def step(self, gradient):
        super().step(gradient)
        self.saved = copy.deepcopy(self.optimizer.state_dict()["state"])


class ByAllReduce(Right):
    """An all-reduce of flat after the update adds N - 1 old copies of each element to the new one."""

    def share(self):
        ring.all_reduce(self.flat)


class DividesTheParameters(Right):
    def reduce(self, gradient):
        return ring.reduce_scatter(gradient)

    def share(self):
        self.shard /= self.n
        super().share()


class ZerosElsewhere(Right):
    def share(self):
        mine = self.shard.clone()
        self.flat.zero_()
        self.shard.copy_(mine)


class ByElements(Right):
    def reduce(self, gradient):
        return ring.reduce_scatter(gradient) / gradient.numel()


class DividesTheRate(Right):
    def __init__(self, flat, optimizer_class, lr):
        super().__init__(flat, optimizer_class, lr / dist.get_world_size())

    def reduce(self, gradient):
        return ring.reduce_scatter(gradient)


class ByTheShard(Right):
    def reduce(self, gradient):
        return ring.reduce_scatter(gradient) / len(self.shard)


class TorchsChunks(Right):
    def cut(self):
        length = -(-self.flat.numel() // self.n)
        return slice(length * dist.get_rank(), length * (dist.get_rank() + 1))


RIGHT = [Right, Padded, CopiesBack]
WRONG = [
    (DividesTheRate, "lr was divided by the number of ranks, and the gradient was not"),
    (ByTheShard, "divided by the length of the shard, not by the number of ranks"),
    (ByAllReduce, "flat was summed over the ranks after the update"),
    (DividesTheParameters, "the updated parameters were divided by N, and the gradient was not"),
    (ZerosElsewhere, "each rank's flat is zeros outside its own shard"),
    (ByElements, "divided by the number of elements, not of ranks"),
    (alone(TorchsChunks), "cut the shard with ring.chunks, too. torch.chunk cuts elsewhere"),
    (Stub, "not written yet"),
    (Backup, "rank 0 keeps a tensor of 4004 bytes between the steps (look at `self.backup`)"),
    (LastCopy, "rank 0 keeps a tensor of 4004 bytes between the steps (look at `self.last`)"),
    (GradientInTheState, "It has exp_avg, exp_avg_sq and whole: keep what the optimizer makes, and no more"),
    (StateBackup, "rank 0 keeps a copy of the optimizer's state in `self.saved"),
    (NoGather, "`flat` never got the others': all-gather flat itself"),
    (NeverCommunicates, "with its own gradient alone, and nobody got the others'"),
    (OwnGradient, "with its own gradient alone: reduce-scatter first"),
    (Sum, "that is the sum of the gradients"),
    (ThreePsi, "moves 3.0Ψ a step (ring.all_gather, ring.all_reduce) where 2Ψ is enough"),
    (NativeThreePsi, "moves 3.0Ψ a step (dist.all_reduce, ring.all_gather) where 2Ψ is enough"),
    (Remainder, "the remainder is lost: the last numel % N elements never change"),
    (Forgetful, "forgets m and v at every step"),
    (CopiedShard, "step left flat as it was: let your shard be a view"),
    (
        Unsharded,
        "the state is not sharded: rank 0 holds 8,004 bytes of state, and m and v of its share have 8Ψ/N = "
        "2,000",
    ),
    (WholeStateOwnShard, "the state is not sharded"),
    (GathersFirst, "one step behind: all-gather after the update"),
    (PilesUp, "pile up from step to step"),
    (AveragesWeights, "the weights were averaged instead of the gradients"),
    (
        AveragesOwnShards,
        "the weights were averaged instead of the gradients: each rank's optimizer stepped on",
    ),
    (AveragesChunks, "the weights were averaged instead of the gradients: each rank's optimizer stepped on"),
    (StepsTwice, "each step is taken twice: call the optimizer's step once"),
    (NextChunk, "rank 0's optimizer gets the gradient of chunk 1, and its shard is chunk 0"),
    (OneStepLate, "each update uses the numbers of the step before, and the first of them twice"),
    (OwnShare, "nothing of the other ranks is in it"),
    (OwnOnceMore, "each rank adds its own numbers once more"),
    (NoLearningRate, "lr was not passed on"),
    (History, "bytes more after every step (look at `History.past["),
    (ByHand, "forgets m and v"),
    (Rounds, "right up to rounding"),
    (NoStep, "no optimizer took a step, so nothing was updated"),
    (NoGradient, "took its steps without a gradient"),
    (alone(NeighboursView), "rank 0's optimizer has elements 333 to 666 of flat, which are rank 1's"),
    (alone(FirstView), "rank 1's optimizer has elements 0 to 333 of flat, which are rank 0's"),
    (ByTwo, "the sum was divided by 2, whatever the number of ranks"),
    (RateTimesRanks, "lr was multiplied by the number of ranks"),
    (Decays, "the optimizer was built with weight_decay=0.1"),
    (AlwaysSGD, "the optimizer is SGD, and optimizer_class is AdamW here"),
    (alone(TheEngine), "zerolab's own ZeroOptimizer"),
    (lambda flat, optimizer_class, lr: flat, "'Tensor' object has no attribute 'step'"),
]
diagnose = together(check_zero1, [*RIGHT, *(wrong for wrong, _ in WRONG)])


@pytest.mark.parametrize("cls", RIGHT)
def test_every_right_way_passes(cls):
    assert isinstance(diagnose(cls), Reached | None)


@pytest.mark.parametrize(
    ("cls", "sentence"),
    WRONG,
)
def test_each_classic_mistake_is_named(cls, sentence):
    assert sentence in diagnose(cls)


def test_bytes_are_those_of_a_ring_whatever_the_collective_is_called():
    def everything():
        tensor, rank, n = torch.zeros(12), dist.get_rank(), dist.get_world_size()
        ring.all_reduce(tensor)
        dist.all_reduce(tensor)
        dist.reduce_scatter(torch.zeros(12 // n), list(tensor.split(12 // n)))
        dist.all_gather(list(tensor.split(12 // n)), torch.zeros(12 // n))
        return rank

    messages = attempt(everything, [()] * 3).messages[0]
    ring_pass = 12 * 4 * 2 / 3
    assert sent_bytes(messages, 3) == pytest.approx(6 * ring_pass)


LAYER = nn.Sequential(nn.Linear(6, 20), nn.Linear(20, 4))


@pytest.mark.parametrize("ranks", range(1, 9))
def test_the_map_gives_every_element_one_owner(ranks):
    alt = spoken(figures.partition_map, 3.4, layer=LAYER, ranks=ranks)
    owned = {name: [] for name, _ in LAYER.named_parameters()}
    for name, first, last in re.findall(r"(\w+\.\w+)\[(\d+):(\d+)\]", alt):
        owned[name] += range(int(first), int(last))
    assert owned == {name: list(range(parameter.numel())) for name, parameter in LAYER.named_parameters()}
    assert alt.count("rank ") >= ranks


def test_the_map_leaves_the_layer_alone():
    before = [parameter.data_ptr() for parameter in LAYER.parameters()]
    spoken(figures.partition_map, layer=LAYER, ranks=3)
    assert [parameter.data_ptr() for parameter in LAYER.parameters()] == before


def test_the_seam_counts_the_passes():
    alt = spoken(figures.seam, 2.4)
    assert "moves 2Ψ" in alt and "moves 3Ψ" in alt


def test_the_engine_is_found_where_the_notebook_has_loaded_it_before():
    """cloudpickle then sends the module with any function that uses the name ``optimizer``."""
    importlib.import_module("zerolab.optimizer")
    assert "zerolab's own ZeroOptimizer" in check_zero1.diagnose(TheEngine)
    assert check_zero1.diagnose(Right) is None
