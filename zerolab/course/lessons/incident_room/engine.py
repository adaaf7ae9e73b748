"""The engine that all tickets are about, in its right form: stage 1 in four verbs."""

import torch
import torch.distributed as dist

from zerolab import ring

MOMENTUM = 0.8


class Engine:
    """Every rank has all parameters in `flat`, and owns one shard of them.

    cut: choose the shard. reduce: sum a gradient over the ranks. update: step on the shard. gather: send the
    shard to all.
    """

    def __init__(self, flat, lr):
        self.flat, self.lr = flat, lr
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.total = 0  # of the gradients of a step, for this shard
        self.cut()

    def cut(self):
        mine = ring.chunks(self.flat.numel(), self.world_size)[self.rank]
        self.shard = self.flat[mine]  # a view: an update of the shard is an update of flat
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
        for batch in batches:
            self.reduce(batch.gradient(self.flat))
        self.update(len(batches))
        self.gather()
