"""Ticket 2: with more micro-batches the loss falls more slowly."""

import torch
import torch.distributed as dist

from zerolab import ring
from zerolab.course.lessons.incident_room.check import Ticket
from zerolab.course.lessons.incident_room.engine import MOMENTUM
from zerolab.course.lessons.incident_room.lockstep import times, trained
from zerolab.course.lessons.incident_room.room import Case


class Engine2:
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
        self.shard.grad = self.total / (self.world_size * micro_batches)  # the mean
        self.optimizer.step()
        self.total = 0

    def gather(self):
        ring.all_gather(self.flat)

    def step(self, batches):
        for batch in batches:
            scaled = batch.gradient(self.flat) / len(batches)  # of the loss over len(batches)
            self.reduce(scaled)
        self.update(len(batches))
        self.gather()


class Repaired(Engine2):
    def step(self, batches):
        for batch in batches:
            self.reduce(batch.gradient(self.flat))
        self.update(len(batches))  # it divides, and nobody else does
        self.gather()


# A sentence, and where the ranks end.
# fmt: off
MISTAKES = {
    "each gradient is still divided by the number of micro-batches twice":
        lambda case: trained(case, times(1 / case.micro_batches)),
    "the gradient is M times as long as it should be, with M micro-batches: of the divisions by M one has to "
    "stay, and nothing may multiply by M":
        lambda case: trained(case, times(case.micro_batches)),
    "you took out the division by the number of ranks, and one by the micro-batches is still too many":
        lambda case: trained(case, times(case.ranks / case.micro_batches)),
}
# fmt: on
TICKET = Ticket(
    Engine2,
    "Two layers of software each divided by the number of micro-batches, and each was right by itself. "
    "Accelerate and the Trainer of transformers did it (huggingface/accelerate#3533); so did the Trainer "
    "and DeepSpeed (huggingface/transformers#35808).",
    (
        "with one micro-batch all is well. What in the engine depends on the number of micro-batches?",
        "the mean of M gradients has one division by M. Follow one gradient from step to the optimizer, and "
        "count.",
        "either step divides or update does. Take one of the two divisions by the number of micro-batches "
        "out.",
    ),
    cases=(Case(3, micro_batches=4), Case(2, micro_batches=3), Case(4)),
    mistakes=MISTAKES,
)
check_2 = TICKET.check(2, [Repaired])
