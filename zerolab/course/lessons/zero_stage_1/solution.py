"""A solution of lesson 04's exercise."""

import torch.distributed as dist

from zerolab import ring


class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat, self.world_size = flat, dist.get_world_size()
        mine = ring.chunks(flat.numel(), self.world_size)[dist.get_rank()]
        self.shard = flat[mine]  # a view: an update of the shard is an update of flat
        self.optimizer = optimizer_class([self.shard], lr=lr)

    def step(self, gradient):
        self.shard.grad = ring.reduce_scatter(gradient) / self.world_size
        self.optimizer.step()
        ring.all_gather(self.flat)
