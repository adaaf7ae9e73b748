# %% check_order | reduces each unit at once, in this rank's own order | in which its own get ready
class InOrder:
    def __init__(self, sizes):
        self.sizes, self.shards = sizes, {}

    def ready(self, name, flat):
        self.shards[name] = ring.reduce_scatter(flat).clone()

    def finish(self):
        for name, size in self.sizes.items():
            if name not in self.shards:
                self.ready(name, torch.zeros(size, device=zerolab.device()))


# %% check_order | a shard is a view, so every whole buffer stays | is a view, which keeps the whole buffer
class InOrder:
    def __init__(self, sizes):
        self.sizes, self.shards = sizes, {}
        self.waiting, self.names = {}, list(sizes)

    def ready(self, name, flat):
        self.waiting[name] = flat
        while self.names and self.names[0] in self.waiting:
            turn = self.names.pop(0)
            self.shards[turn] = ring.reduce_scatter(self.waiting.pop(turn))

    def finish(self):
        while self.names:
            name = self.names[0]
            self.ready(name, self.waiting.pop(name, torch.zeros(self.sizes[name], device=zerolab.device())))


# %% check_order | buffers stay in the dictionary after they are reduced | Take it out there
class InOrder:
    def __init__(self, sizes):
        self.sizes, self.shards = sizes, {}
        self.seen, self.place = {}, 0

    def ready(self, name, flat):
        self.seen[name] = flat
        names = list(self.sizes)
        while self.place < len(names) and names[self.place] in self.seen:
            turn = names[self.place]
            self.shards[turn] = ring.reduce_scatter(self.seen[turn]).clone()
            self.place += 1

    def finish(self):
        for name in list(self.sizes)[self.place :]:
            self.ready(name, self.seen.get(name, torch.zeros(self.sizes[name], device=zerolab.device())))


# %% check_order | finish stops at the first unit that this rank never got | finish has to reduce zeros
class InOrder:
    def __init__(self, sizes):
        self.sizes, self.shards = sizes, {}
        self.waiting, self.left = {}, list(sizes)

    def ready(self, name, flat):
        self.waiting[name] = flat
        self.finish()

    def finish(self):
        for name in list(self.left):
            if name not in self.waiting:
                break
            self.left.remove(name)
            self.shards[name] = ring.reduce_scatter(self.waiting.pop(name)).clone()


# %% check_order | reduces from the last unit to the first, as backward goes | The order of sizes is a, b, c, d
class InOrder:
    def __init__(self, sizes):
        self.sizes, self.shards = sizes, {}
        self.waiting, self.left = {}, list(sizes)

    def ready(self, name, flat):
        self.waiting[name] = flat
        while self.left and self.left[-1] in self.waiting:
            self.take(self.left.pop())

    def take(self, name):
        zeros = torch.zeros(self.sizes[name], device=zerolab.device())
        self.shards[name] = ring.reduce_scatter(self.waiting.pop(name, zeros)).clone()

    def finish(self):
        while self.left:
            self.take(self.left.pop())


# %% check_order | ready reduces one unit at most, so those behind it wait until finish | and it is its turn
class InOrder:
    def __init__(self, sizes):
        self.sizes, self.shards = sizes, {}
        self.waiting, self.left = {}, list(sizes)

    def ready(self, name, flat):
        self.waiting[name] = flat
        if name == self.left[0]:
            self.take(self.left.pop(0))

    def take(self, name):
        zeros = torch.zeros(self.sizes[name], device=zerolab.device())
        self.shards[name] = ring.reduce_scatter(self.waiting.pop(name, zeros)).clone()

    def finish(self):
        while self.left:
            self.take(self.left.pop(0))


# %% check_order | reduces the buffer that came last for each unit that waits | buffer a second time
class InOrder:
    def __init__(self, sizes):
        self.sizes, self.shards = sizes, {}
        self.waiting, self.left = {}, list(sizes)

    def ready(self, name, flat):
        self.waiting[name] = flat
        while self.left and self.left[0] in self.waiting:
            turn = self.left.pop(0)
            self.shards[turn] = ring.reduce_scatter(flat)[: self.sizes[turn]].clone()
            del self.waiting[turn]

    def finish(self):
        while self.left:
            name = self.left[0]
            self.ready(name, self.waiting.pop(name, torch.zeros(self.sizes[name], device=zerolab.device())))


# %% check_order | a unit without a gradient gets zeros, and nothing is sent | finish has to reduce zeros
class InOrder:
    def __init__(self, sizes):
        self.sizes, self.shards = sizes, {}
        self.waiting, self.left = {}, list(sizes)

    def ready(self, name, flat):
        self.waiting[name] = flat
        while self.left and self.left[0] in self.waiting:
            turn = self.left.pop(0)
            self.shards[turn] = ring.reduce_scatter(self.waiting.pop(turn)).clone()

    def finish(self):
        for name in self.left:
            if name in self.waiting:
                self.shards[name] = ring.reduce_scatter(self.waiting.pop(name)).clone()
            else:
                mine = ring.chunks(self.sizes[name], dist.get_world_size())[dist.get_rank()]
                self.shards[name] = torch.zeros(mine.stop - mine.start, device=zerolab.device())


# %% check_order | right: a generator takes the buffers in turn |
class InOrder:
    def __init__(self, sizes):
        self.sizes, self.shards, self.waiting, self.over = sizes, {}, {}, False
        self.worker = self.work()
        next(self.worker)

    def work(self):
        for name, size in self.sizes.items():
            while name not in self.waiting and not self.over:
                yield
            if name not in self.waiting:
                self.waiting[name] = torch.zeros(size, device=zerolab.device())
            self.shards[name] = ring.reduce_scatter(self.waiting.pop(name)).clone()
        yield

    def ready(self, name, flat):
        self.waiting[name] = flat
        del flat
        next(self.worker)

    def finish(self):
        self.over = True
        next(self.worker, None)


# %% check_order | right: ready calls itself for the unit that comes next |
class InOrder:
    def __init__(self, sizes):
        self.sizes, self.shards = sizes, {}
        self.order, self.waiting = iter(sizes), {}
        self.turn = next(self.order, None)

    def ready(self, name, flat):
        if name != self.turn:
            self.waiting[name] = flat
            return
        self.shards[name] = ring.reduce_scatter(flat) + 0
        del flat
        self.turn = next(self.order, None)
        if self.turn in self.waiting:
            self.ready(self.turn, self.waiting.pop(self.turn))

    def finish(self):
        while self.turn is not None:
            self.ready(self.turn, torch.zeros(self.sizes[self.turn], device=zerolab.device()))


# %% check_reduce_and_keep | the first micro-batch returns a view | it returned a view of the whole gradient
def reduce_and_keep(flat, kept):
    mine = ring.reduce_scatter(flat)
    return mine if kept is None else kept + mine


# %% check_reduce_and_keep | keeps the last micro-batch alone | A rank holds the last micro-batch alone
def reduce_and_keep(flat, kept):
    return ring.reduce_scatter(flat).clone()


# %% check_reduce_and_keep | asks a tensor whether it is true | Boolean value of Tensor with more than one
def reduce_and_keep(flat, kept):
    mine = ring.reduce_scatter(flat).clone()
    if kept:
        mine += kept
    return mine


# %% check_reduce_and_keep | cuts its shard with a whole division and loses the rest | last element is lost
def reduce_and_keep(flat, kept):
    ring.reduce_scatter(flat)
    size, rank = flat.numel() // dist.get_world_size(), dist.get_rank()
    mine = flat[rank * size : (rank + 1) * size].clone()
    return mine if kept is None else mine + kept


# %% check_reduce_and_keep | takes the chunk of the right neighbour, as many rings leave it there | partial sums
def reduce_and_keep(flat, kept):
    ring.reduce_scatter(flat)
    ranks = dist.get_world_size()
    mine = flat[ring.chunks(flat.numel(), ranks)[(dist.get_rank() + 1) % ranks]].clone()
    return mine if kept is None else mine + kept


# %% check_reduce_and_keep | reduces a copy, so that the gradient stays as it is | clone no more than
def reduce_and_keep(flat, kept):
    mine = ring.reduce_scatter(flat.clone()).clone()
    return mine if kept is None else mine.add_(kept)


# %% check_reduce_and_keep | takes the mean over the ranks | That is the mean over the ranks
def reduce_and_keep(flat, kept):
    mine = ring.reduce_scatter(flat) / dist.get_world_size()
    return mine if kept is None else kept + mine


# %% check_reduce_and_keep | sums everything on every rank and then cuts | that is an all-reduce
def reduce_and_keep(flat, kept):
    ring.all_reduce(flat)
    mine = flat[ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]].clone()
    return mine if kept is None else kept + mine


# %% check_reduce_and_keep | right: puts what it kept into its chunk before the reduction |
def reduce_and_keep(flat, kept):
    if kept is not None:
        flat[ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]] += kept
    return torch.empty_like(mine := ring.reduce_scatter(flat)).copy_(mine)


# %% check_reduce_and_keep | right: adds to zero, which makes a new tensor |
def reduce_and_keep(flat, kept):
    return (0 if kept is None else kept) + ring.reduce_scatter(flat)


# %% check_clip | adds the norms of the ranks and not their squares | That is the sum of the shards' norms
def clip_shard(shard, max_norm):
    norm = shard.norm()
    dist.all_reduce(norm)
    if norm > max_norm:
        shard *= max_norm / norm
    return norm


# %% check_clip | a rank with a small norm skips the all-reduce | Does a rank with a small norm skip
def clip_shard(shard, max_norm):
    norm = shard.norm()
    if norm > max_norm:
        square = norm**2
        dist.all_reduce(square)
        norm = square.sqrt()
        shard *= max_norm / norm
    return norm


# %% check_clip | forgets the root | That is the sum of the squares: take its root
def clip_shard(shard, max_norm):
    norm = shard.square().sum()
    dist.all_reduce(norm)
    if norm > max_norm:
        shard *= max_norm / norm
    return norm


# %% check_clip | makes a gradient that is small enough larger | a gradient below max_norm is scaled up
def clip_shard(shard, max_norm):
    square = shard.square().sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    shard.mul_(max_norm / norm)
    return norm


# %% check_clip | multiplies into a new tensor | scale it in place
def clip_shard(shard, max_norm):
    square = shard.square().sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    shard = shard * (max_norm / norm).clamp(max=1)
    return norm


# %% check_clip | returns the norm after clipping | That is the norm after the clipping
def clip_shard(shard, max_norm):
    square = shard.square().sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    if norm > max_norm:
        shard *= max_norm / norm
        norm = norm * (max_norm / norm)
    return norm


# %% check_clip | takes the largest norm of all ranks | That is the largest of the shards' norms
def clip_shard(shard, max_norm):
    norm = shard.norm()
    dist.all_reduce(norm, op=dist.ReduceOp.MAX)
    shard *= (max_norm / norm).clamp(max=1)
    return norm


# %% check_clip | sends its whole shard to every rank | with dist.all_gather, and one number is enough
def clip_shard(shard, max_norm):
    length = torch.tensor([shard.numel()], device=shard.device)
    dist.all_reduce(length, op=dist.ReduceOp.MAX)
    padded = torch.cat([shard, shard.new_zeros(length.item() - shard.numel())])
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, padded)
    norm = torch.cat(parts).norm()
    shard *= (max_norm / norm).clamp(max=1)
    return norm


# %% check_clip | right: gathers one norm of each rank and takes the norm of them |
def clip_shard(shard, max_norm):
    norms = [shard.new_empty(1) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, shard.norm().reshape(1))
    norm = torch.cat(norms).norm().item()
    shard.div_(max(1.0, norm / max_norm))
    return norm
