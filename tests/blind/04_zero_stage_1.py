# %% check_owned | rounds the shard down, so the last elements have no owner | rounds down
def owned_slices(sizes, world_size, rank):
    shard = sum(sizes) // world_size
    low, high, first, owned = rank * shard, (rank + 1) * shard, 0, []
    for size in sizes:
        start, stop = max(low - first, 0), min(high - first, size)
        owned.append((start, stop) if start < stop else (0, 0))
        first += size
    return owned


# %% check_owned | counts from the start of the flat buffer | positions in the flat buffer
def owned_slices(sizes, world_size, rank):
    shard = -(-sum(sizes) // world_size)
    low, high, first, owned = rank * shard, (rank + 1) * shard, 0, []
    for size in sizes:
        start, stop = max(low, first), min(high, first + size)
        owned.append((start, stop) if start < stop else (0, 0))
        first += size
    return owned


# %% check_owned | gives whole parameters to the rank of their first element | dealt out whole
def owned_slices(sizes, world_size, rank):
    shard, first, owned = -(-sum(sizes) // world_size), 0, []
    for size in sizes:
        owned.append((0, size) if first // shard == rank else (0, 0))
        first += size
    return owned


# %% check_owned | cuts every parameter into N parts, not the buffer | cut into N parts
def owned_slices(sizes, world_size, rank):
    owned = []
    for size in sizes:
        share = -(-size // world_size)
        owned.append((min(rank * share, size), min((rank + 1) * share, size)))
    return owned


# %% check_owned | leaves out the parameters of which the rank owns nothing | are left out
def owned_slices(sizes, world_size, rank):
    shard = -(-sum(sizes) // world_size)
    low, high, first, owned = rank * shard, (rank + 1) * shard, 0, []
    for size in sizes:
        start, stop = max(low - first, 0), min(high - first, size)
        if start < stop:
            owned.append((start, stop))
        first += size
    return owned


# %% check_owned | the stop is inclusive | Stop is one too small
def owned_slices(sizes, world_size, rank):
    shard = -(-sum(sizes) // world_size)
    low, high, first, owned = rank * shard, (rank + 1) * shard, 0, []
    for size in sizes:
        start, stop = max(low - first, 0), min(high - first, size)
        owned.append((start, stop - 1) if start < stop else (0, 0))
        first += size
    return owned


# %% check_owned | returns start and length in place of start and stop | That is (start, length)
def owned_slices(sizes, world_size, rank):
    shard = -(-sum(sizes) // world_size)
    low, high, first, owned = rank * shard, (rank + 1) * shard, 0, []
    for size in sizes:
        start, stop = max(low - first, 0), min(high - first, size)
        owned.append((start, stop - start) if start < stop else (0, 0))
        first += size
    return owned


# %% check_owned | the first ranks get one more, as with chunks | as ring.chunks cuts
def owned_slices(sizes, world_size, rank):
    mine, first, owned = ring.chunks(sum(sizes), world_size)[rank], 0, []
    for size in sizes:
        start, stop = max(mine.start - first, 0), min(mine.stop - first, size)
        owned.append((start, stop) if start < stop else (0, 0))
        first += size
    return owned


# %% check_owned | right: asks for each place in turn, and returns ranges |
def owned_slices(sizes, world_size, rank):
    shard, place, owned = (sum(sizes) + world_size - 1) // world_size, 0, []
    for size in sizes:
        mine = [k for k in range(size) if (place + k) // max(shard, 1) == rank]
        owned.append(range(mine[0], mine[-1] + 1) if mine else range(0))
        place += size
    return owned


# %% check_zero1 | steps on the summed gradient, never divides | That is the sum
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat = flat
        self.mine = flat[ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]]
        self.optimizer = optimizer_class([self.mine], lr=lr)

    def step(self, gradient):
        self.mine.grad = ring.reduce_scatter(gradient)
        self.optimizer.step()
        ring.all_gather(self.flat)


# %% check_zero1 | no all-gather, every rank has its own part new alone | never got the others'
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat = flat
        self.mine = flat[ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]]
        self.optimizer = optimizer_class([self.mine], lr=lr)

    def step(self, gradient):
        self.mine.grad = ring.reduce_scatter(gradient) / dist.get_world_size()
        self.optimizer.step()


# %% check_zero1 | the optimizer gets a copy of the part, and flat never changes | Step left flat as it was
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat = flat
        self.mine = flat[ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]].clone()
        self.optimizer = optimizer_class([self.mine], lr=lr)

    def step(self, gradient):
        self.mine.grad = ring.reduce_scatter(gradient) / dist.get_world_size()
        self.optimizer.step()
        ring.all_gather(self.flat)


# %% check_zero1 | builds a new optimizer at each step, so m and v are lost | build it once
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat, self.optimizer_class, self.lr = flat, optimizer_class, lr
        self.mine = flat[ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]]

    def step(self, gradient):
        self.mine.grad = ring.reduce_scatter(gradient) / dist.get_world_size()
        self.optimizer = self.optimizer_class([self.mine], lr=self.lr)
        self.optimizer.step()
        ring.all_gather(self.flat)


# %% check_zero1 | an all-reduce of the gradient, then an all-gather | use its first half
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat = flat
        self.place = ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]
        self.mine = flat[self.place]
        self.optimizer = optimizer_class([self.mine], lr=lr)

    def step(self, gradient):
        ring.all_reduce(gradient)
        gradient /= dist.get_world_size()
        self.mine.grad = gradient[self.place]
        self.optimizer.step()
        ring.all_gather(self.flat)


# %% check_zero1 | ignores lr, the optimizer takes its default | lr was not passed on
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat = flat
        self.mine = flat[ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]]
        self.optimizer = optimizer_class([self.mine])

    def step(self, gradient):
        self.mine.grad = ring.reduce_scatter(gradient).div_(dist.get_world_size())
        self.optimizer.step()
        ring.all_gather(self.flat)


# %% check_zero1 | always AdamW, whatever class is asked for | The optimizer is AdamW
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat = flat
        self.mine = flat[ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]]
        self.optimizer = torch.optim.AdamW([self.mine], lr=lr)

    def step(self, gradient):
        self.mine.grad = ring.reduce_scatter(gradient).div_(dist.get_world_size())
        self.optimizer.step()
        ring.all_gather(self.flat)


# %% check_zero1 | adds to the gradient of the last step and never clears it | The gradients pile up
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat = flat
        self.mine = flat[ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]]
        self.mine.grad = torch.zeros_like(self.mine)
        self.optimizer = optimizer_class([self.mine], lr=lr)

    def step(self, gradient):
        self.mine.grad += ring.reduce_scatter(gradient).div_(dist.get_world_size())
        self.optimizer.step()
        ring.all_gather(self.flat)


# %% check_zero1 | gathers into a clone and copies back (silver, no gold) | without a whole copy
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat = flat
        self.mine = flat[ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]]
        self.optimizer = optimizer_class([self.mine], lr=lr)

    def step(self, gradient):
        self.mine.grad = ring.reduce_scatter(gradient).div_(dist.get_world_size())
        self.optimizer.step()
        whole = self.flat.clone()
        ring.all_gather(whole)
        self.flat.copy_(whole)


# %% check_zero1 | right: a parameter that shares the part's memory, scaled before the sum |
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.size = dist.get_world_size()
        place = ring.chunks(len(flat), self.size)[dist.get_rank()]
        self.flat, self.part = flat, nn.Parameter(flat.detach()[place])
        self.inner = optimizer_class([{"params": [self.part], "lr": lr}], lr=lr)

    def step(self, gradient):
        gradient.mul_(1 / self.size)
        self.part.grad = ring.reduce_scatter(gradient)
        self.inner.step()
        self.inner.zero_grad(set_to_none=True)
        with torch.no_grad():
            ring.all_gather(self.flat)


# %% check_load | reads the file of its own rank alone | its own number alone
def load_shard(read, saved_by, numel, world_size, rank):
    old, new = -(-numel // saved_by), -(-numel // world_size)
    shard = torch.zeros(new)
    if rank < saved_by:
        length = min(old, new)
        shard[:length] = read(rank, 0, length)
    return shard


# %% check_load | the old padding is taken into the new shards | old padding is still there
def load_shard(read, saved_by, numel, world_size, rank):
    old, new = -(-numel // saved_by), -(-numel // world_size)
    pieces, place, stop = [], rank * new, min((rank + 1) * new, old * saved_by)
    while place < stop:
        file = place // old
        until = min(stop, (file + 1) * old)
        pieces.append(read(file, place - file * old, until - file * old))
        place = until
    got = torch.cat([*pieces, torch.zeros(0)])
    return torch.cat([got, torch.zeros(new - len(got))])


# %% check_load | the last shards are shorter, without padding | the new padding is missing
def load_shard(read, saved_by, numel, world_size, rank):
    old, new = -(-numel // saved_by), -(-numel // world_size)
    low, high = min(rank * new, numel), min((rank + 1) * new, numel)
    pieces = [torch.zeros(0)]
    for file in range(saved_by):
        start, stop = max(low, file * old), min(high, (file + 1) * old)
        if start < stop:
            pieces.append(read(file, start - file * old, stop - file * old))
    return torch.cat(pieces)


# %% check_load | reads at the places of the whole state, not of the file | in the whole state
def load_shard(read, saved_by, numel, world_size, rank):
    old, new = -(-numel // saved_by), -(-numel // world_size)
    low, high, shard = rank * new, min((rank + 1) * new, numel), torch.zeros(new)
    for file in range(saved_by):
        start, stop = max(low, file * old), min(high, (file + 1) * old)
        if start < stop:
            shard[start - low : stop - low] = read(file, start, stop)
    return shard


# %% check_load | cuts the new shards from the padded length | drop the padding first
def load_shard(read, saved_by, numel, world_size, rank):
    old = -(-numel // saved_by)
    new = -(-old * saved_by // world_size)
    low, high, shard = rank * new, min((rank + 1) * new, numel), torch.zeros(new)
    for file in range(saved_by):
        start, stop = max(low, file * old), min(high, (file + 1) * old)
        if start < stop:
            shard[start - low : stop - low] = read(file, start - file * old, stop - file * old)
    return shard


# %% check_load | reads two files at most, so a large new shard has a hole | alone were read
def load_shard(read, saved_by, numel, world_size, rank):
    old, new = -(-numel // saved_by), -(-numel // world_size)
    low, high, shard = rank * new, min((rank + 1) * new, numel), torch.zeros(new)
    for file in (low // old, low // old + 1):
        start, stop = max(low, file * old), min(high, (file + 1) * old)
        if start < stop:
            shard[start - low : stop - low] = read(file, start - file * old, stop - file * old)
    return shard


# %% check_load | the padding of the new shards is not zero | is padding, which has to be 0
def load_shard(read, saved_by, numel, world_size, rank):
    old, new = -(-numel // saved_by), -(-numel // world_size)
    low, high, shard = rank * new, min((rank + 1) * new, numel), torch.full((new,), 7.0)
    for file in range(saved_by):
        start, stop = max(low, file * old), min(high, (file + 1) * old)
        if start < stop:
            shard[start - low : stop - low] = read(file, start - file * old, stop - file * old)
    return shard


# %% check_load | reads all files and cuts afterwards (bronze, no silver) | all there are
def load_shard(read, saved_by, numel, world_size, rank):
    old, new = -(-numel // saved_by), -(-numel // world_size)
    whole = torch.cat([read(file, 0, old) for file in range(saved_by)])[:numel]
    padded = torch.zeros(new * world_size)
    padded[:numel] = whole
    return padded[rank * new : (rank + 1) * new].clone()


# %% check_load | the shard is returned in fp64 | it returned float64
def load_shard(read, saved_by, numel, world_size, rank):
    old, new = -(-numel // saved_by), -(-numel // world_size)
    low, high = rank * new, min((rank + 1) * new, numel)
    shard = torch.zeros(new, dtype=torch.float64)
    for file in range(saved_by):
        start, stop = max(low, file * old), min(high, (file + 1) * old)
        if start < stop:
            shard[start - low : stop - low] = read(file, start - file * old, stop - file * old)
    return shard


# %% check_load | right: reads one number at a time |
def load_shard(read, saved_by, numel, world_size, rank):
    old, new = (numel + saved_by - 1) // saved_by, (numel + world_size - 1) // world_size
    places = range(rank * new, (rank + 1) * new)
    numbers = [read(*divmod(k, old), k % old + 1).item() if k < numel else 0.0 for k in places]
    return torch.tensor(numbers, dtype=torch.float32)


# %% check_owned | an empty slice is written as None | returned None
def owned_slices(sizes, world_size, rank):
    shard = -(-sum(sizes) // world_size)
    low, high, first, owned = rank * shard, (rank + 1) * shard, 0, []
    for size in sizes:
        start, stop = max(low - first, 0), min(high - first, size)
        owned.append((start, stop) if start < stop else None)
        first += size
    return owned


# %% check_owned | the stop of a parameter outside the shard is negative | gets a negative stop
def owned_slices(sizes, world_size, rank):
    shard = -(-sum(sizes) // world_size)
    low, first, owned = rank * shard, 0, []
    for size in sizes:
        owned.append((max(low - first, 0), min(low + shard - first, size)))
        first += size
    return owned


# %% check_owned | the ranks are counted from 1 | ranks begin with 0
def owned_slices(sizes, world_size, rank):
    shard = -(-sum(sizes) // world_size)
    low, high, first, owned = (rank - 1) * shard, rank * shard, 0, []
    for size in sizes:
        start, stop = max(low - first, 0), min(high - first, size)
        owned.append((start, stop) if start < stop else (0, 0))
        first += size
    return owned


# %% check_owned | always one element of padding, also where N divides the sum | one too many where N divides
def owned_slices(sizes, world_size, rank):
    shard = sum(sizes) // world_size + 1
    low, high, first, owned = rank * shard, (rank + 1) * shard, 0, []
    for size in sizes:
        start, stop = max(low - first, 0), min(high - first, size)
        owned.append((start, stop) if start < stop else (0, 0))
        first += size
    return owned


# %% check_owned | the last slice runs into the padding | cut both ends off
def owned_slices(sizes, world_size, rank):
    shard = -(-sum(sizes) // world_size)
    padded = [*sizes[:-1], sizes[-1] + shard * world_size - sum(sizes)]
    low, high, first, owned = rank * shard, (rank + 1) * shard, 0, []
    for size in padded:
        start, stop = max(low - first, 0), min(high - first, size)
        owned.append((start, stop) if start < stop else (0, 0))
        first += size
    return owned


# %% check_owned | the start is taken as 0 where the shard begins inside | Each slice begins at 0
def owned_slices(sizes, world_size, rank):
    shard = -(-sum(sizes) // world_size)
    low, high, first, owned = rank * shard, (rank + 1) * shard, 0, []
    for size in sizes:
        stop = min(high, first + size) - max(low, first)
        owned.append((0, stop) if stop > 0 else (0, 0))
        first += size
    return owned


# %% check_zero1 | each rank steps on its own gradient | with its own gradient alone
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat = flat
        self.place = ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]
        self.mine = flat[self.place]
        self.optimizer = optimizer_class([self.mine], lr=lr)

    def step(self, gradient):
        self.mine.grad = gradient[self.place].clone()
        self.optimizer.step()
        ring.all_gather(self.flat)


# %% check_zero1 | the optimizer has the whole flat tensor | the state is not sharded
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat = flat
        self.place = ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]
        self.optimizer = optimizer_class([self.flat], lr=lr)

    def step(self, gradient):
        own = ring.reduce_scatter(gradient).clone() / dist.get_world_size()
        self.flat.grad = torch.zeros_like(self.flat)
        self.flat.grad[self.place] = own
        self.optimizer.step()
        ring.all_gather(self.flat)


# %% check_zero1 | equal shares with // and the remainder is updated by no rank | The remainder is lost
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat, share = flat, flat.numel() // dist.get_world_size()
        self.head = flat[: share * dist.get_world_size()]
        self.mine = self.head[share * dist.get_rank() : share * (dist.get_rank() + 1)]
        self.optimizer = optimizer_class([self.mine], lr=lr)

    def step(self, gradient):
        own = ring.reduce_scatter(gradient[: self.head.numel()])
        self.mine.grad = own / dist.get_world_size()
        self.optimizer.step()
        ring.all_gather(self.head)


# %% check_zero1 | gathers before the update | one step behind
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat = flat
        self.mine = flat[ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]]
        self.optimizer = optimizer_class([self.mine], lr=lr)

    def step(self, gradient):
        self.mine.grad = ring.reduce_scatter(gradient) / dist.get_world_size()
        ring.all_gather(self.flat)
        self.optimizer.step()


# %% check_zero1 | divides the parameters after the gather, not the gradient | parameters were divided by N
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat = flat
        self.mine = flat[ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]]
        self.optimizer = optimizer_class([self.mine], lr=lr)

    def step(self, gradient):
        self.mine.grad = ring.reduce_scatter(gradient)
        self.optimizer.step()
        ring.all_gather(self.flat)
        self.flat /= dist.get_world_size()


# %% check_zero1 | sets the gradient on a slice made anew | of the very tensor
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat = flat
        self.place = ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]
        self.optimizer = optimizer_class([flat[self.place]], lr=lr)

    def step(self, gradient):
        self.flat[self.place].grad = ring.reduce_scatter(gradient) / dist.get_world_size()
        self.optimizer.step()
        ring.all_gather(self.flat)


# %% check_zero1 | self.flat is a clone, the caller's never changes | Step left flat as it was
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat = flat.clone()
        self.mine = self.flat[ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]]
        self.optimizer = optimizer_class([self.mine], lr=lr)

    def step(self, gradient):
        self.mine.grad = ring.reduce_scatter(gradient) / dist.get_world_size()
        self.optimizer.step()
        ring.all_gather(self.flat)


# %% check_load | reads each file whole (bronze, no silver) | only where your shard overlaps it
def load_shard(read, saved_by, numel, world_size, rank):
    old, new = -(-numel // saved_by), -(-numel // world_size)
    low, high, shard = rank * new, min((rank + 1) * new, numel), torch.zeros(new)
    for file in range(saved_by):
        start, stop = max(low, file * old), min(high, (file + 1) * old)
        if start < stop:
            shard[start - low : stop - low] = read(file, 0, old)[start - file * old : stop - file * old]
    return shard


# %% check_load | the shards are rounded down, so the last numbers are lost | rounds down
def load_shard(read, saved_by, numel, world_size, rank):
    old, new = -(-numel // saved_by), numel // world_size
    low, high, shard = rank * new, (rank + 1) * new, torch.zeros(new)
    for file in range(saved_by):
        start, stop = max(low, file * old), min(high, (file + 1) * old)
        if start < stop:
            shard[start - low : stop - low] = read(file, start - file * old, stop - file * old)
    return shard


# %% check_load | takes the files for chunks without padding | ring.chunks cuts
def load_shard(read, saved_by, numel, world_size, rank):
    new, files = -(-numel // world_size), ring.chunks(numel, saved_by)
    low, high, shard = rank * new, min((rank + 1) * new, numel), torch.zeros(new)
    for file, place in enumerate(files):
        start, stop = max(low, place.start), min(high, place.stop)
        if start < stop:
            shard[start - low : stop - low] = read(file, start - place.start, stop - place.start)
    return shard


# %% check_load | the pieces stand at the front of the shard, one over the other | over the one before
def load_shard(read, saved_by, numel, world_size, rank):
    old, new = -(-numel // saved_by), -(-numel // world_size)
    low, high, shard = rank * new, min((rank + 1) * new, numel), torch.zeros(new)
    for file in range(saved_by):
        start, stop = max(low, file * old), min(high, (file + 1) * old)
        if start < stop:
            shard[: stop - start] = read(file, start - file * old, stop - file * old)
    return shard


# %% check_load | returns a list of the pieces, not one tensor | it returned list
def load_shard(read, saved_by, numel, world_size, rank):
    old, new = -(-numel // saved_by), -(-numel // world_size)
    low, high, pieces = rank * new, min((rank + 1) * new, numel), []
    for file in range(saved_by):
        start, stop = max(low, file * old), min(high, (file + 1) * old)
        if start < stop:
            pieces.append(read(file, start - file * old, stop - file * old))
    return pieces


# %% check_load | reads every file, also those that it needs nothing of | needs nothing of file
def load_shard(read, saved_by, numel, world_size, rank):
    old, new = -(-numel // saved_by), -(-numel // world_size)
    low, high, shard = rank * new, min((rank + 1) * new, numel), torch.zeros(new)
    for file in range(max(saved_by, world_size)):
        start, stop = max(low, file * old), min(high, (file + 1) * old)
        got = read(file, max(start - file * old, 0), max(stop - file * old, 0))
        if start < stop:
            shard[start - low : stop - low] = got
    return shard


# %% check_load | the padding stands at the front of the last shard | before the values
def load_shard(read, saved_by, numel, world_size, rank):
    old, new = -(-numel // saved_by), -(-numel // world_size)
    low, high = min(rank * new, numel), min((rank + 1) * new, numel)
    pieces = [torch.zeros(new - (high - low))]
    for file in range(saved_by):
        start, stop = max(low, file * old), min(high, (file + 1) * old)
        if start < stop:
            pieces.append(read(file, start - file * old, stop - file * old))
    return torch.cat(pieces)


# %% check_load | reads as many files as there are new ranks | Only the first world_size files
def load_shard(read, saved_by, numel, world_size, rank):
    old, new = -(-numel // saved_by), -(-numel // world_size)
    low, high, shard = rank * new, min((rank + 1) * new, numel), torch.zeros(new)
    for file in range(world_size):
        start, stop = max(low, file * old), min(high, (file + 1) * old)
        if start < stop:
            shard[start - low : stop - low] = read(file, start - file * old, stop - file * old)
    return shard


# %% check_owned | cuts at rounded multiples of total / N | multiples of numel / N, each rounded
def owned_slices(sizes, world_size, rank):
    total = sum(sizes)
    low, high = round(rank * total / world_size), round((rank + 1) * total / world_size)
    first, owned = 0, []
    for size in sizes:
        start, stop = max(low - first, 0), min(high - first, size)
        owned.append((start, stop) if start < stop else (0, 0))
        first += size
    return owned


# %% check_owned | one slice of the buffer, not of each parameter | return one for each
def owned_slices(sizes, world_size, rank):
    shard = -(-sum(sizes) // world_size)
    return [(rank * shard, min((rank + 1) * shard, sum(sizes)))]


# %% check_owned | deals elements out like cards | elements go to the ranks in turn
def owned_slices(sizes, world_size, rank):
    first, owned = 0, []
    for size in sizes:
        mine = [k for k in range(size) if (first + k) % world_size == rank]
        owned.append((mine[0], mine[-1] + 1) if mine else (0, 0))
        first += size
    return owned


# %% check_owned | the offset is never moved on | as if it were the first in the buffer
def owned_slices(sizes, world_size, rank):
    shard = -(-sum(sizes) // world_size)
    low, high, first, owned = rank * shard, (rank + 1) * shard, 0, []
    for size in sizes:
        start, stop = max(low - first, 0), min(high - first, size)
        owned.append((start, stop) if start < stop else (0, 0))
    return owned


# %% check_zero1 | reduce-scatters a clone (silver, no gold) | without a whole copy
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat = flat
        self.mine = flat[ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]]
        self.optimizer = optimizer_class([self.mine], lr=lr)

    def step(self, gradient):
        self.mine.grad = ring.reduce_scatter(gradient.clone()) / dist.get_world_size()
        self.optimizer.step()
        ring.all_gather(self.flat)


# %% check_zero1 | passes weight_decay=0 | pass on lr=lr and no more
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat = flat
        self.mine = flat[ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]]
        self.optimizer = optimizer_class([self.mine], lr=lr, weight_decay=0)

    def step(self, gradient):
        self.mine.grad = ring.reduce_scatter(gradient) / dist.get_world_size()
        self.optimizer.step()
        ring.all_gather(self.flat)


# %% check_zero1 | steps twice | Each step is taken twice
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat = flat
        self.mine = flat[ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]]
        self.optimizer = optimizer_class([self.mine], lr=lr)

    def step(self, gradient):
        self.mine.grad = ring.reduce_scatter(gradient) / dist.get_world_size()
        self.optimizer.step()
        self.optimizer.step()
        ring.all_gather(self.flat)


# %% check_zero1 | its part is the chunk of the next rank | so cut with your own rank
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat = flat
        place = (dist.get_rank() + 1) % dist.get_world_size()
        self.mine = flat[ring.chunks(flat.numel(), dist.get_world_size())[place]]
        self.optimizer = optimizer_class([self.mine], lr=lr)

    def step(self, gradient):
        own = ring.reduce_scatter(gradient) / dist.get_world_size()
        self.mine.grad = torch.cat([own, own])[: self.mine.numel()]
        self.optimizer.step()
        ring.all_gather(self.flat)


# %% check_zero1 | divides by N twice, before and after the sum | number of ranks twice
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat, self.size = flat, dist.get_world_size()
        self.mine = flat[ring.chunks(flat.numel(), self.size)[dist.get_rank()]]
        self.optimizer = optimizer_class([self.mine], lr=lr)

    def step(self, gradient):
        gradient /= self.size
        self.mine.grad = ring.reduce_scatter(gradient) / self.size
        self.optimizer.step()
        ring.all_gather(self.flat)


# %% check_load | reads one number too many (bronze, no silver) | only where your shard overlaps it
def load_shard(read, saved_by, numel, world_size, rank):
    old, new = -(-numel // saved_by), -(-numel // world_size)
    low, high, shard = rank * new, min((rank + 1) * new, numel), torch.zeros(new)
    for file in range(saved_by):
        start, stop = max(low, file * old), min(high, (file + 1) * old)
        if start < stop:
            begin = max(start - file * old - 1, 0)
            got = read(file, begin, stop - file * old)
            shard[start - low : stop - low] = got[start - file * old - begin :]
    return shard


# %% check_load | the files are taken in reverse order | in reverse order
def load_shard(read, saved_by, numel, world_size, rank):
    old, new = -(-numel // saved_by), -(-numel // world_size)
    low, high, shard = rank * new, min((rank + 1) * new, numel), torch.zeros(new)
    for file in range(saved_by):
        start, stop = max(low, file * old), min(high, (file + 1) * old)
        if start < stop:
            shard[start - low : stop - low] = read(saved_by - 1 - file, start - file * old, stop - file * old)
    return shard


# %% check_load | loses the last number of each file | does not reach it: stop is the place behind the last
def load_shard(read, saved_by, numel, world_size, rank):
    old, new = -(-numel // saved_by), -(-numel // world_size)
    low, high, shard = rank * new, min((rank + 1) * new, numel), torch.zeros(new)
    for file in range(saved_by):
        start, stop = max(low, file * old), min(high, (file + 1) * old - 1)
        if start < stop:
            shard[start - low : stop - low] = read(file, start - file * old, stop - file * old)
    return shard


# %% check_load | reads number k from file k % N, like dealt cards | of the state belongs there
def load_shard(read, saved_by, numel, world_size, rank):
    new = -(-numel // world_size)
    shard = torch.zeros(new)
    for place in range(rank * new, min((rank + 1) * new, numel)):
        file, index = place % saved_by, place // saved_by
        shard[place - rank * new] = read(file, index, index + 1)[0]
    return shard
