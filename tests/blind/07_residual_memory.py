# %% check_block | leaves out f, so x gets this rank's part of the gradient | f is missing, or its backward
def summed(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def g(product):
    return operator(product, forward=summed, backward=lambda gradient: gradient)


def split_mlp(x, w1, b1, w2, b2):
    mine = ring.chunks(len(w1), dist.get_world_size())[dist.get_rank()]
    hidden = gelu(linear(x, w1[mine], b1[mine]))
    return g(linear(hidden, w2[:, mine])) + b2


# %% check_block | each rank adds the second bias before the sum | Every rank adds b2 before g adds up
def summed(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def f(x):
    return operator(x, forward=lambda same: same, backward=summed)


def g(product):
    return operator(product, forward=summed, backward=lambda gradient: gradient)


def split_mlp(x, w1, b1, w2, b2):
    mine = ring.chunks(len(w1), dist.get_world_size())[dist.get_rank()]
    hidden = gelu(linear(f(x), w1[mine], b1[mine]))
    return g(linear(hidden, w2[:, mine], b2))


# %% check_block | each rank adds a part of the second bias before the sum | b2 is divided by N before g
def summed(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def f(x):
    return operator(x, forward=lambda same: same, backward=summed)


def g(product):
    return operator(product, forward=summed, backward=lambda gradient: gradient)


def split_mlp(x, w1, b1, w2, b2):
    ranks = dist.get_world_size()
    mine = ring.chunks(len(w1), ranks)[dist.get_rank()]
    hidden = gelu(linear(f(x), w1[mine], b1[mine]))
    return g(linear(hidden, w2[:, mine], b2 / ranks))


# %% check_block | g adds up the gradients in backward as well | f and g both add up in the backward pass
def summed(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def f(x):
    return operator(x, forward=lambda same: same, backward=summed)


def g(product):
    return operator(product, forward=summed, backward=summed)


def split_mlp(x, w1, b1, w2, b2):
    mine = ring.chunks(len(w1), dist.get_world_size())[dist.get_rank()]
    hidden = gelu(linear(f(x), w1[mine], b1[mine]))
    return g(linear(hidden, w2[:, mine])) + b2


# %% check_block | rank r takes the part of the last rank but r | is in the part of rank N - 1 - r
def summed(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def f(x):
    return operator(x, forward=lambda same: same, backward=summed)


def g(product):
    return operator(product, forward=summed, backward=lambda gradient: gradient)


def split_mlp(x, w1, b1, w2, b2):
    mine = ring.chunks(len(w1), dist.get_world_size())[-1 - dist.get_rank()]
    hidden = gelu(linear(f(x), w1[mine], b1[mine]))
    return g(linear(hidden, w2[:, mine])) + b2


# %% check_block | multiplies with whole weights and puts zeros outside its part | Cut the weights before
def summed(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def f(x):
    return operator(x, forward=lambda same: same, backward=summed)


def g(product):
    return operator(product, forward=summed, backward=lambda gradient: gradient)


def split_mlp(x, w1, b1, w2, b2):
    mask = torch.zeros_like(b1)
    mask[ring.chunks(len(w1), dist.get_world_size())[dist.get_rank()]] = 1
    hidden = gelu(linear(f(x), w1, b1)) * mask
    return g(linear(hidden, w2)) + b2


# %% check_block | returns what dist.all_reduce returns, which is nothing | forward returned NoneType
def summed(tensor):
    return dist.all_reduce(tensor.clone())


def f(x):
    return operator(x, forward=lambda same: same, backward=summed)


def g(product):
    return operator(product, forward=summed, backward=lambda gradient: gradient)


def split_mlp(x, w1, b1, w2, b2):
    mine = ring.chunks(len(w1), dist.get_world_size())[dist.get_rank()]
    hidden = gelu(linear(f(x), w1[mine], b1[mine]))
    return g(linear(hidden, w2[:, mine])) + b2


# %% check_block | adds up the first product, too, before gelu | The hidden features of all ranks are added up
def summed(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def f(x):
    return operator(x, forward=lambda same: same, backward=summed)


def g(product):
    return operator(product, forward=summed, backward=lambda gradient: gradient)


def split_mlp(x, w1, b1, w2, b2):
    mine = ring.chunks(len(w1), dist.get_world_size())[dist.get_rank()]
    hidden = gelu(g(linear(f(x), w1[mine], b1[mine])))
    return g(linear(hidden, w2[:, mine])) + b2


# %% check_block | right: two classes of autograd functions, and torch.chunk |
class Enter(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(context, part):
        total = part.detach().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context, gradient):
        return gradient


def split_mlp(x, w1, b1, w2, b2):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    columns, bias, rows = (t.chunk(ranks, d)[rank] for t, d in ((w1, 0), (b1, 0), (w2, 1)))
    return Leave.apply(gelu(Enter.apply(x) @ columns.T + bias) @ rows.T) + b2


# %% check_packing | keeps a view of the tensor, which holds all of it | which is a view of it
class Packed:
    def __init__(self, tensor):
        self.shape, self.numel, self.dtype = tensor.shape, tensor.numel(), tensor.dtype
        self.mine = ring.chunks(self.numel, dist.get_world_size())[dist.get_rank()]
        self.part = tensor.detach().reshape(-1)[self.mine]

    def unpack(self):
        flat = torch.empty(self.numel, dtype=self.dtype, device=self.part.device)
        flat[self.mine] = self.part
        ring.all_gather(flat)
        return flat.view(self.shape)


# %% check_packing | does not detach, so autograd keeps the graph | The part has a graph
class Packed:
    def __init__(self, tensor):
        self.shape, self.numel = tensor.shape, tensor.numel()
        self.mine = ring.chunks(self.numel, dist.get_world_size())[dist.get_rank()]
        self.part = tensor.reshape(-1)[self.mine].clone()

    def unpack(self):
        with torch.no_grad():
            flat = self.part.new_empty(self.numel)
            flat[self.mine] = self.part
            ring.all_gather(flat)
        return flat.view(self.shape)


# %% check_packing | loses the remainder where N does not divide | parts of numel // N leave out the last ones
class Packed:
    def __init__(self, tensor):
        self.shape, ranks = tensor.shape, dist.get_world_size()
        size = tensor.numel() // ranks
        self.part = tensor.detach().reshape(-1)[: size * ranks].view(ranks, size)[dist.get_rank()].clone()

    def unpack(self):
        whole = self.part.new_zeros(self.shape.numel())
        flat = self.part.new_empty(self.part.numel() * dist.get_world_size())
        flat.view(-1, self.part.numel())[dist.get_rank()] = self.part
        ring.all_gather(flat)
        whole[: flat.numel()] = flat
        return whole.view(self.shape)


# %% check_packing | the tensor comes back in fp32 | keep its own dtype
class Packed:
    def __init__(self, tensor):
        self.shape, self.numel = tensor.shape, tensor.numel()
        self.mine = ring.chunks(self.numel, dist.get_world_size())[dist.get_rank()]
        self.part = tensor.detach().flatten()[self.mine].clone()

    def unpack(self):
        flat = torch.empty(self.numel, device=self.part.device)
        flat[self.mine] = self.part
        ring.all_gather(flat)
        return flat.view(self.shape)


# %% check_packing | one buffer for all tensors of a shape, which stays | Look at `Packed.buffers
class Packed:
    buffers = {}

    def __init__(self, tensor):
        self.shape = tensor.shape
        flat = self.buffers.setdefault(self.shape, torch.empty_like(tensor.detach()).flatten())
        self.mine = ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]
        self.part = tensor.detach().flatten()[self.mine].clone()

    def unpack(self):
        flat = self.buffers[self.shape]
        flat[self.mine] = self.part
        ring.all_gather(flat)
        return flat.view(self.shape).clone()


# %% check_packing | remembers what unpack returned, in case it is asked again | in `self.whole`
class Packed:
    def __init__(self, tensor):
        self.shape, self.numel, self.whole = tensor.shape, tensor.numel(), None
        self.mine = ring.chunks(self.numel, dist.get_world_size())[dist.get_rank()]
        self.part = tensor.detach().flatten()[self.mine].clone()

    def unpack(self):
        if self.whole is None:
            flat = self.part.new_empty(self.numel)
            flat[self.mine] = self.part
            ring.all_gather(flat)
            self.whole = flat.view(self.shape)
        return self.whole


# %% check_packing | fills the rest with zeros and adds up over the ranks | adds up zeros where nothing
class Packed:
    def __init__(self, tensor):
        self.shape, self.numel = tensor.shape, tensor.numel()
        self.mine = ring.chunks(self.numel, dist.get_world_size())[dist.get_rank()]
        self.part = tensor.detach().flatten()[self.mine].clone()

    def unpack(self):
        flat = self.part.new_zeros(self.numel)
        flat[self.mine] = self.part
        ring.all_reduce(flat)
        return flat.view(self.shape)


# %% check_packing | the padding is not cut off before the shape is restored | and padding
class Packed:
    def __init__(self, tensor):
        self.shape, ranks = tensor.shape, dist.get_world_size()
        flat = tensor.detach().flatten()
        padded = torch.cat([flat, flat.new_zeros(-len(flat) % ranks)])
        self.part = padded.chunk(ranks)[dist.get_rank()].clone()

    def unpack(self):
        ranks, rank = dist.get_world_size(), dist.get_rank()
        flat = self.part.new_empty(ranks * len(self.part))
        flat.chunk(ranks)[rank].copy_(self.part)
        ring.all_gather(flat)
        return flat.view(self.shape)


# %% check_packing | right: padded parts and torch's own all-gather, in a list |
class Packed:
    def __init__(self, tensor):
        with torch.no_grad():
            ranks, flat = dist.get_world_size(), tensor.flatten()
            size = -(-flat.numel() // ranks)
            self.part = flat.new_zeros(size)
            mine = flat[size * dist.get_rank() :][:size]
            self.part[: len(mine)] = mine
            self.shape = tuple(tensor.shape)

    def unpack(self):
        parts = [torch.empty_like(self.part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, self.part)
        numel = torch.Size(self.shape).numel()
        return torch.cat(parts)[:numel].reshape(self.shape)


# %% check_packing | right: keeps a closure in place of attributes |
class Packed:
    def __init__(self, tensor):
        shape, options = tensor.shape, {"dtype": tensor.dtype, "device": tensor.device}
        mine = ring.chunks(shape.numel(), dist.get_world_size())[dist.get_rank()]
        part = tensor.detach().contiguous().view(-1)[mine].clone()

        def unpack():
            whole = torch.empty(shape, **options)
            whole.view(-1)[mine] = part
            ring.all_gather(whole.view(-1))
            return whole

        self.unpack = unpack


# %% check_bytes | counts one way | each byte is counted once
def moved_bytes(psi, n_d, kept, n_m, precision):
    k, size = (12, 2) if precision == "mixed" else (8, 4)
    return k * psi / n_d + size * kept / n_m


# %% check_bytes | does not shard the optimizer state | / n_d is missing
def moved_bytes(psi, n_d, kept, n_m, precision):
    k, size = (12, 2) if precision == "mixed" else (8, 4)
    return 2 * k * psi + 2 * size * kept / n_m


# %% check_bytes | divides the parameters of the rank's part by n_m once more | is divided by n_m, too
def moved_bytes(psi, n_d, kept, n_m, precision):
    k, size = (12, 2) if precision == "mixed" else (8, 4)
    return 2 * k * psi / (n_d * n_m) + 2 * size * kept / n_m


# %% check_bytes | an element of an input always takes 2 bytes | an element has 2 bytes in both precisions
def moved_bytes(psi, n_d, kept, n_m, precision):
    k = 12 if precision == "mixed" else 8
    return 2 * k * psi / n_d + 2 * 2 * kept / n_m


# %% check_bytes | K is 12 in both precisions | K is 12 in both precisions
def moved_bytes(psi, n_d, kept, n_m, precision):
    size = {"mixed": 2, "fp32": 4}[precision]
    return 2 * (12 * psi / n_d + size * kept / n_m)


# %% check_bytes | the inputs are divided by all ranks | the inputs are divided by n_d, too
def moved_bytes(psi, n_d, kept, n_m, precision):
    k, size = (12, 2) if precision == "mixed" else (8, 4)
    return 2 * k * psi / n_d + 2 * size * kept / (n_m * n_d)


# %% check_bytes | returns the two parts and not their sum | your function returned tuple
def moved_bytes(psi, n_d, kept, n_m, precision):
    k, size = (12, 2) if precision == "mixed" else (8, 4)
    return 2 * k * psi / n_d, 2 * size * kept / n_m


# %% check_bytes | right: four transfers in a list |
def moved_bytes(psi, n_d, kept, n_m, precision):
    mixed = precision == "mixed"
    state, part = (8 + 4 * mixed) * psi / n_d, (4 >> mixed) * kept / n_m
    return sum([state, part, part, state])
