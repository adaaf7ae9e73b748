"""Solutions of lesson 05's exercises."""

import torch
import torch.distributed as dist

from zerolab import ring


def reduce_and_keep(flat, kept):
    # Stage 2 adds this clone to stage 1: a view would keep the whole of flat. See zerolab/stages/stage2.py.
    mine = ring.reduce_scatter(flat).clone()
    return mine if kept is None else kept + mine


class InOrder:
    def __init__(self, sizes):
        self.sizes, self.order = sizes, list(sizes)
        self.waiting, self.shards = {}, {}

    def ready(self, name, flat):
        self.waiting[name] = flat
        while self.order and self.order[0] in self.waiting:
            first = self.order.pop(0)
            self.shards[first] = ring.reduce_scatter(self.waiting.pop(first)).clone()

    def finish(self):
        for name in list(self.order):  # the other ranks wait for this rank's part of each sum
            if name in self.order and name not in self.waiting:
                self.ready(name, torch.zeros(self.sizes[name]))


def clip_shard(shard, max_norm):
    square = shard.norm().square().view(1)
    dist.all_reduce(square)  # every rank, also one that has nothing to clip
    norm = square.sqrt().item()
    if norm > max_norm:
        shard.mul_(max_norm / norm)
    return norm
