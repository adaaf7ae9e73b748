"""Ticket 10: the loss ends higher than in one process, and no rank disagrees with another."""

import torch
import torch.distributed as dist

from zerolab import ring
from zerolab.course.lessons.incident_room.check import Ticket
from zerolab.course.lessons.incident_room.costs import costs_too_much
from zerolab.course.lessons.incident_room.engine import MOMENTUM
from zerolab.course.lessons.incident_room.lockstep import Gradients, sum_of, trained, weighted_mean
from zerolab.course.lessons.incident_room.room import Case, batches


class Engine10:
    def __init__(self, flat, lr):
        self.flat, self.lr = flat, lr
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.total = 0
        self.cut()

    def cut(self):
        mine = ring.chunks(self.flat.numel(), self.world_size)[self.rank]
        self.shard = self.flat[mine]
        self.optimizer = torch.optim.SGD([self.shard], self.lr, MOMENTUM)

    def reduce(self, gradient):
        self.total = self.total + ring.reduce_scatter(gradient)

    def update(self, micro_batches):
        self.shard.grad = self.total / (self.world_size * micro_batches)
        self.optimizer.step()
        self.total = 0

    def gather(self):
        ring.all_gather(self.flat)

    def step(self, batches):
        for batch in batches:  # len(batch) samples, and their mean gradient
            self.reduce(batch.gradient(self.flat))
        self.update(len(batches))
        self.gather()


class Repaired(Engine10):
    def step(self, batches):
        samples = torch.tensor(float(sum(map(len, batches))))
        dist.all_reduce(samples)
        for batch in batches:
            self.reduce(batch.gradient(self.flat) * len(batch))  # the sum over its samples
        self.update(samples.item() / self.world_size)  # update multiplies by the ranks again
        self.gather()


def weighted(by_rank: bool = False, divided: bool = True, share: bool = False, twice: bool = False):
    """Where the ranks end if micro-batches count by their samples.

    `by_rank`: within a rank only. Not `divided`: the sum. `share`: divided by the owner's own samples.
    `twice`: each gradient is multiplied by its samples once more.
    """

    def ended(case: Case) -> list[torch.Tensor]:
        counts = [[len(batch) for batch in batches(case, rank)] for rank in range(case.ranks)]

        def combine(gradients: Gradients, owner: int) -> torch.Tensor:
            sums = [
                sum_of(count ** (1 + twice) * gradient for count, gradient in zip(*pair, strict=True))
                for pair in zip(counts, gradients, strict=True)
            ]
            if by_rank:
                return sum_of(each / sum(own) for each, own in zip(sums, counts, strict=True)) / case.ranks
            own = sum(counts[owner]) if share else sum(map(sum, counts))
            return sum_of(sums) / (own if divided else 1) / (case.ranks if share else 1)

        return trained(case, combine)

    return ended


def squared(case: Case) -> list[torch.Tensor]:
    """Where the ranks end if each micro-batch counts by the square of its samples."""
    counts = [[len(batch) ** 2 for batch in batches(case, rank)] for rank in range(case.ranks)]
    return trained(case, lambda gradients, owner: weighted_mean(gradients, counts))


def by_micro_batch(case: Case) -> list[torch.Tensor]:
    """Where the ranks end if each micro-batch is weighed over the ranks, and their means are averaged."""
    counts = [[len(batch) for batch in batches(case, rank)] for rank in range(case.ranks)]

    def combine(gradients: Gradients, owner: int) -> torch.Tensor:
        means = [
            weighted_mean([[own[micro]] for own in gradients], [[own[micro]] for own in counts])
            for micro in range(case.micro_batches)
        ]
        return sum_of(means) / case.micro_batches

    return trained(case, combine)


def _cost(case, ended) -> str | None:
    found = costs_too_much(case, ended)
    if found and "moves" in found:
        return f"{found}. The ranks need one number of each other, the count, not a gradient more"
    return found


# A sentence, and where the ranks end.
# fmt: off
MISTAKES = {
    "that is still a mean of means: a small micro-batch counts as much as a large one":
        trained,
    "each rank weighs its own micro-batches by their samples, and then all ranks count the same: "
    "divide by "
    "the samples of all ranks":
        weighted(by_rank=True),
    "each micro-batch is weighed over the ranks, and then all micro-batches count the same: divide by the "
    "samples of all of them":
        by_micro_batch,
    "each gradient is multiplied by its samples twice, and the sum is divided by the sum of their squares: "
    "batch.gradient is a mean, so multiply by len(batch) once":
        squared,
    "each gradient is multiplied by its samples twice, and the sum is divided by all samples: batch.gradient "
    "is a mean, so multiply by len(batch) once":
        weighted(twice=True),
    "the weighted sum is right, and nothing divides it":
        weighted(divided=False),
    "each rank divides its shard by its own samples: the count has to be summed over the ranks":
        weighted(share=True),
}
# fmt: on
TICKET = Ticket(
    Engine10,
    "A mean of means is the mean only where all parts are equally large. transformers averaged "
    "micro-batches with different numbers of tokens as if they were equal. It was told in "
    "huggingface/transformers#24725, and mended a year later in huggingface/transformers#34191.",
    (
        "batch.gradient is the mean over len(batch) samples. When is the mean of such means the mean of all?",
        "multiply each gradient by len(batch), so that sums are added. What do you divide by in the end?",
        "by the number of samples on all ranks: all-reduce the count, one number.",
    ),
    cases=(Case(3, micro_batches=2, uneven=True), Case(2, uneven=True), Case(4, uneven=True)),
    right=weighted(),
    mistakes=MISTAKES,
    cost=_cost,
)
check_10 = TICKET.check(10, [Repaired])
