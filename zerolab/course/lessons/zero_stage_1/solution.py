"""Solutions of lesson 04's exercises."""

import torch
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


def owned_slices(sizes, world_size, rank):
    shard = -(-sum(sizes) // world_size)  # rounded up: the padding makes all shards equal
    first, offset, slices = shard * rank, 0, []
    for size in sizes:
        start, stop = max(first - offset, 0), min(first + shard - offset, size)
        slices.append((start, stop) if start < stop else (0, 0))
        offset += size
    return slices


def load_shard(read, saved_by, numel, world_size, rank):
    saved, own = -(-numel // saved_by), -(-numel // world_size)
    shard, first = torch.zeros(own), own * rank  # zeros: the new padding
    last = min(first + own, numel)  # here the old padding is dropped
    for file in range(saved_by):
        start, stop = max(first, saved * file), min(last, saved * (file + 1))
        if start < stop:
            shard[start - first : stop - first] = read(file, start - saved * file, stop - saved * file)
    return shard
