"""Ticket 4: memory grows with every micro-batch."""

import torch
import torch.distributed as dist

from zerolab import ring
from zerolab.course.lessons.incident_room.check import Ticket
from zerolab.course.lessons.incident_room.costs import costs_too_much
from zerolab.course.lessons.incident_room.engine import MOMENTUM
from zerolab.course.lessons.incident_room.held import ITEM
from zerolab.course.lessons.incident_room.room import PSI, Case


class Engine4:
    def __init__(self, flat, lr):
        self.flat, self.lr = flat, lr
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.parts = []  # this rank's part of every micro-batch
        self.cut()

    def cut(self):
        mine = ring.chunks(self.flat.numel(), self.world_size)[self.rank]
        self.shard = self.flat[mine]
        self.optimizer = torch.optim.SGD([self.shard], self.lr, MOMENTUM)

    def reduce(self, gradient):
        part = ring.reduce_scatter(gradient)  # the 1/N that this rank needs
        self.parts.append(part)

    def update(self, micro_batches):
        self.shard.grad = sum(self.parts) / (self.world_size * micro_batches)
        self.optimizer.step()
        self.parts = []

    def gather(self):
        ring.all_gather(self.flat)

    def step(self, batches):
        for batch in batches:
            self.reduce(batch.gradient(self.flat))
        self.update(len(batches))
        self.gather()


class Repaired(Engine4):
    def reduce(self, gradient):
        part = ring.reduce_scatter(gradient)  # a view, which keeps all of gradient alive
        self.parts = [sum(self.parts) + part]  # a sum is a tensor of its own


def kept_too_much(case, ended) -> str | None:
    """What the engine keeps while it accumulates: one shard of a gradient, and the momentum."""
    shard = -(-PSI // len(ended)) * ITEM
    for rank, each in enumerate(ended):
        for micro_batch in range(len(each.kept) - 2, 0, -1):  # before the last one it is most
            before = each.kept[micro_batch]
            whole = {name: size for name, size in before.items() if size >= PSI * ITEM}
            if whole:
                count = "whole gradients" if len(whole) > 1 else "a whole gradient"
                return (
                    f"the values are right, but before micro-batch {micro_batch} rank {rank} keeps {count} "
                    f"alive, in `{next(iter(whole))}`: keep one shard of your own, not a view of a gradient "
                    "and not a whole sum"
                )
            if each.held[micro_batch].whole > 1:
                return (
                    f"the values are right, but before micro-batch {micro_batch} there are "
                    f"{each.held[micro_batch].whole} whole gradients in rank {rank}'s memory, or views that "
                    "keep them there: keep one shard of your own, also in the variables of step"
                )
            if sum(before.values()) > 3 * shard:
                return (
                    f"the values are right, but before micro-batch {micro_batch} rank {rank} keeps "
                    f"{sum(before.values()):,} bytes, a shard for each micro-batch, where one sum of "
                    f"{shard} bytes is enough: add up as they come"
                )
    return None


def reduced_once(case, ended) -> str | None:
    """Whether whole gradients were accumulated, which the bytes tell: only one was reduced."""
    if all(each.passes[-1] > case.micro_batches for each in ended):
        return None
    return (
        f"the values are right, and a step moves only {ended[0].passes[-1]:.0f}Ψ: whole gradients are "
        "accumulated and reduced once. That is stage 1, and there is no memory for a whole gradient: "
        "reduce each micro-batch"
    )


TICKET = Ticket(
    Engine4,
    "A view keeps the whole storage alive, in memory and on disk. DeepSpeed's checkpoints of stage 2 grew "
    "many times too large, because torch.save writes the storage behind a view "
    "(deepspeedai/DeepSpeed#3303); the way out was to clone (deepspeedai/DeepSpeed#3348).",
    (
        "which tensor owns the memory behind each entry of self.parts?",
        "ring.reduce_scatter returns a view of its argument. A view keeps the whole storage alive.",
        "add the part to one running sum. A sum is a tensor of its own, and the gradient can go.",
    ),
    cases=(Case(3, micro_batches=4), Case(2, micro_batches=4), Case(4, micro_batches=4)),
    memory=True,
    cost=lambda case, ended: (
        kept_too_much(case, ended) or reduced_once(case, ended) or costs_too_much(case, ended)
    ),
)
check_4 = TICKET.check(4, [Repaired])
