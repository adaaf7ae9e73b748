"""Lesson 04: what the optimizers took, which gradients they got and what was sent tell the mistake."""

import pytest
import torch
import torch.distributed as dist
from support.answers import alone, together
from support.lessons import solutions_travel_by_value

from zerolab import ring
from zerolab.course.lessons.zero_stage_1 import check_zero1

solutions_travel_by_value(__name__)


class Right:
    """Stage 1 as it should be; each subclass below makes one mistake."""

    kinds = {}  # noqa: RUF012

    def __init__(self, flat, optimizer_class, lr):
        self.flat, self.rank, self.n, self.lr = flat, dist.get_rank(), dist.get_world_size(), lr
        self.count = 0
        self.shard = flat[self.cut()]
        self.optimizer = optimizer_class([self.shard], lr=lr, **self.kinds.get(optimizer_class, {}))

    def cut(self):
        return ring.chunks(self.flat.numel(), self.n)[self.rank]

    def parts(self, size):
        return slice(size * self.rank, min(size * (self.rank + 1), self.flat.numel()))

    def reduce(self, gradient):
        return ring.reduce_scatter(gradient) / self.n

    def update(self):
        self.optimizer.step()

    def share(self):
        ring.all_gather(self.flat)

    def step(self, gradient):
        self.shard.grad = self.reduce(gradient)
        self.update()
        self.share()
        self.count += 1


class EqualParts(Right):
    """Parts of equal length, and as much of the chunk's gradient as they take."""

    def reduce(self, gradient):
        own = torch.zeros_like(self.shard)
        chunk = super().reduce(gradient)[: len(own)]
        own[: len(chunk)] = chunk
        return own


class RoundedDown(EqualParts):
    def cut(self):
        return self.parts(self.flat.numel() // self.n)


class RoundedUp(EqualParts):
    def cut(self):
        return self.parts(-(-self.flat.numel() // self.n))


class ShiftedByOne(EqualParts):
    def cut(self):
        piece = super().cut()
        return slice(piece.start + (self.rank > 0), piece.stop)


class Whole(Right):
    """The optimizer has all of flat, and the gradient is not divided."""

    def cut(self):
        return slice(0, self.flat.numel())

    def reduce(self, gradient):
        ring.all_reduce(gradient)
        return gradient

    def share(self): ...


class PartialSum(Right):
    """The chunk behind its own, in which the reduce-scatter has left a partial sum."""

    def reduce(self, gradient):
        own = torch.zeros_like(self.shard)
        ring.reduce_scatter(gradient)
        chunk = gradient[ring.chunks(len(gradient), self.n)[(self.rank + 1) % self.n]][: len(own)]
        own[: len(chunk)] = chunk / self.n
        return own


class NextOfOneRank(Right):
    def reduce(self, gradient):
        chunk = gradient[ring.chunks(len(gradient), self.n)[(self.rank + 1) % self.n]].clone()
        super().reduce(gradient)
        return torch.cat([chunk, chunk])[: len(self.shard)] / self.n


class Zeros(Right):
    def reduce(self, gradient):
        return 0 * super().reduce(gradient)


class Constant(Right):
    def reduce(self, gradient):
        return super().reduce(gradient).mean().expand(len(self.shard)).clone()


class Signs(Right):
    def reduce(self, gradient):
        return super().reduce(gradient).sign()


class DividedByItsNorm(Right):
    def reduce(self, gradient):
        own = super().reduce(gradient)
        return own / own.norm()


class OfFlat(Right):
    def reduce(self, gradient):
        super().reduce(gradient)
        return self.shard.clone()


class FirstGradient(Right):
    def reduce(self, gradient):
        own = super().reduce(gradient)
        return own if self.shard.grad is None else self.shard.grad


class ZerosFirst(Right):
    """Each step uses the gradient of the one before, and the first uses zeros."""

    def reduce(self, gradient):
        before = getattr(self, "now", torch.zeros_like(self.shard))
        self.now = super().reduce(gradient).clone()
        return before


class Momentum(Right):
    """A mean over time, which nobody asked for."""

    def reduce(self, gradient):
        own = super().reduce(gradient)
        return own if self.count == 0 else 0.5 * self.shard.grad + 0.5 * own


class ByTheOthers(Right):
    def reduce(self, gradient):
        return ring.reduce_scatter(gradient) / max(1, self.n - 1)


class ByOneMore(Right):
    def reduce(self, gradient):
        return ring.reduce_scatter(gradient) / (self.n + 1)


class Opposite(Right):
    def reduce(self, gradient):
        return -super().reduce(gradient)


class ByFormula(Right):
    """SGD's formula, whatever the optimizer's class."""

    def update(self):
        self.shard -= self.lr * self.shard.grad


class OneIdleRank(Right):
    def update(self):
        if self.rank != 1:
            self.optimizer.step()


class OneBusyRank(Right):
    def update(self):
        for _ in range(1 + (self.rank == 1)):
            self.optimizer.step()


class ClearsFirst(Right):
    def update(self):
        if self.count:
            self.optimizer.zero_grad()
        self.optimizer.step()


class PutsBack(Right):
    def update(self):
        old = self.shard.clone()
        self.optimizer.step()
        self.shard.copy_(old)


class ChangesAgain(Right):
    def update(self):
        self.optimizer.step()
        self.shard.clamp_(-0.9, 0.9)


class SharesAtTheEnd(Right):
    """All values are right in the end: a step on a shard does not need the others."""

    def share(self):
        if self.count == 2:
            super().share()


class Amsgrad(Right):
    kinds = {torch.optim.AdamW: {"amsgrad": True}}  # noqa: RUF012


class SharesTwice(Right):
    """The gathered parameters are averaged once more, which changes nothing and sends 2Ψ."""

    def share(self):
        super().share()
        ring.all_reduce(self.flat)
        self.flat /= self.n


class ReducesTwice(Right):
    def reduce(self, gradient):
        self.norm = ring.reduce_scatter(gradient.clone()).norm()
        return super().reduce(gradient)


class GathersTwice(Right):
    def share(self):
        super().share()
        super().share()


class Doubles(Right):
    def reduce(self, gradient):
        return ring.reduce_scatter(gradient.double()).float() / self.n


class ListOfChunks(Right):
    def share(self):
        parts = [torch.empty_like(self.flat[piece]) for piece in ring.chunks(len(self.flat), self.n)]
        dist.all_gather(parts, self.shard.detach())
        self.flat.copy_(torch.cat(parts))


class ListOfGradients(Right):
    """Right: dist.reduce_scatter takes chunks of any length."""

    def reduce(self, gradient):
        own = torch.empty_like(self.shard)
        dist.reduce_scatter(own, [gradient[piece] for piece in ring.chunks(len(gradient), self.n)])
        return own / self.n


class OneTensor(Right):
    def reduce(self, gradient):
        own = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(own, gradient)
        return own / self.n


class WholeGradient(Right):
    def reduce(self, gradient):
        ring.reduce_scatter(gradient)
        return gradient / self.n


class ReducesTheShard(Right):
    """Its own chunk of the gradient is cut into chunks once more."""

    def reduce(self, gradient):
        return ring.reduce_scatter(gradient[self.cut()].clone()) / self.n


class BareShard(Right):
    def __init__(self, flat, optimizer_class, lr):
        super().__init__(flat, optimizer_class, lr)
        self.optimizer = optimizer_class(self.shard, lr=lr)


WRONG = [
    (RoundedDown, "elements 0 to 251 on rank 0. Your parts have numel // N or round(numel / N) elements"),
    (RoundedUp, "elements 251 to 501 on rank 1. Your parts have ceil(numel / N) elements. They cut with"),
    (ShiftedByOne, "rank 1's optimizer has elements 334 to 666 of flat, and ring.reduce_scatter and"),
    (Whole, "that is the sum of the gradients"),
    (PartialSum, "gets the gradient of chunk 1, of the gradients of ranks 0 and 2 only, and its shard is"),
    (
        NextOfOneRank,
        "gets the gradient of chunk 1, of the gradients of rank 0 only, and its shard is chunk 0",
    ),
    (Zeros, "the optimizer's gradient is 0 in all elements and steps, so it changes nothing"),
    (Constant, "in all elements: it has to be the mean itself"),
    (Signs, "the optimizer's gradient is 1 in all elements, like the sign of the mean, or the mean rounded"),
    (DividedByItsNorm, "the mean gradient was divided by its norm"),
    (OfFlat, "the optimizer's gradient is made of flat, and not of the gradient"),
    (FirstGradient, "every step uses the mean gradient of step 0"),
    (ZerosFirst, "uses the gradient of the step before, and the first one a gradient of zeros"),
    (Momentum, "the optimizer's gradient is 0.5 × that of step 0 + 0.5 × that of step 1"),
    (ByTheOthers, "the sum was divided by the number of ranks minus 1: divide by the number of ranks (seen"),
    (ByOneMore, "the sum was divided by the number of ranks plus 1"),
    (Opposite, "the gradient has the opposite sign"),
    (ByFormula, "no optimizer took a step, and flat was changed without one"),
    (OneIdleRank, "rank 1's optimizer took no step, and those of other ranks did"),
    (OneBusyRank, "in 3 training steps rank 1's optimizer took 2, 2, 2 steps"),
    (ClearsFirst, "in training step 1, counted from 0, the optimizer took its step without a gradient"),
    (PutsBack, "when step() returns, the old values are there again"),
    (ChangesAgain, "shard of flat is right after the optimizer's step, and when step() returns, it has"),
    (SharesAtTheEnd, "after training step 0, counted from 0, rank 0's flat is not what one process has"),
    (Amsgrad, "but the optimizer was built with amsgrad=True: rank 0 holds"),
    (SharesTwice, "The reduce-scatter and the all-gather do all that is needed: leave out ring.all_reduce"),
    (ReducesTwice, "It calls ring.reduce_scatter 2 times in a step, and once is enough"),
    (GathersTwice, "It calls ring.all_gather 2 times in a step, and once is enough"),
    (Doubles, "It sends float64, and flat and the gradient are float32"),
    (alone(ListOfChunks), "dist.all_gather needs equally many elements on all ranks, and the chunks of 1001"),
    (
        alone(OneTensor),
        "`dist.reduce_scatter_tensor(own, gradient)`). dist.reduce_scatter_tensor needs equally many",
    ),
    (alone(WholeGradient), "That is the whole gradient. Give the shard the chunk that ring.reduce_scatter"),
    (alone(ReducesTheShard), "ring.reduce_scatter got a tensor of 333 elements, and the gradient has 999"),
    (alone(BareShard), "Put the shard into a list: optimizer_class([shard], lr=lr)"),
]
diagnose = together(check_zero1, [Right, ListOfGradients, *(wrong for wrong, _ in WRONG)])


@pytest.mark.parametrize(("cls", "sentence"), WRONG)
def test_the_evidence_tells_the_mistake(cls, sentence):
    found = diagnose(cls)
    assert sentence in found
    assert "all is right with SGD" not in found


@pytest.mark.parametrize("cls", [Right, ListOfGradients])
def test_a_right_way_has_no_such_mistake(cls):
    assert diagnose(cls) is None
