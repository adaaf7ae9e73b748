"""Ticket 7: the gradient norm climbs from step to step."""

import torch
import torch.distributed as dist

from zerolab import ring
from zerolab.course.lessons.incident_room.check import Ticket
from zerolab.course.lessons.incident_room.engine import MOMENTUM
from zerolab.course.lessons.incident_room.lockstep import behind, piled
from zerolab.course.lessons.incident_room.room import Case


class Engine7:
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
        self.log = self.shard.grad.norm().item()  # what the dashboard shows
        self.optimizer.step()
        self.optimizer.zero_grad()  # the next step begins with none

    def gather(self):
        ring.all_gather(self.flat)

    def step(self, batches):
        for batch in batches:
            self.reduce(batch.gradient(self.flat))
        self.update(len(batches))
        self.gather()


class Repaired(Engine7):
    def update(self, micro_batches):
        self.shard.grad = self.total / (self.world_size * micro_batches)
        self.log = self.shard.grad.norm().item()
        self.optimizer.step()
        self.total = 0  # zero_grad clears shard.grad, and the sum is kept here


# A sentence, and where the ranks end.
# fmt: off
MISTAKES = {
    "the gradients of earlier steps are still in the sum: self.total is not cleared":
        piled,
    "each update uses the gradient of the step before: clear the sum after the update, not before":
        behind,
}
# fmt: on
TICKET = Ticket(
    Engine7,
    "A sharded engine keeps gradients where zero_grad does not look. In DeepSpeed the engine's zero_grad "
    "and those of its optimizers cleared different things (deepspeedai/DeepSpeed#6554). In RamTorch the "
    "gradient of the step before was reduced again with the new one, and the norm climbed "
    "(lodestone-rock/RamTorch#13).",
    (
        "the norm climbs although the loss fell at first. Which numbers of a step are still there in the "
        "next?",
        "zero_grad clears shard.grad. Is that where reduce keeps the sum?",
        "set self.total to 0 after the update, and not before it or between micro-batches.",
    ),
    cases=(Case(3, micro_batches=3), Case(2, micro_batches=2), Case(4)),
    mistakes=MISTAKES,
)
check_7 = TICKET.check(7, [Repaired])
