# %% check_peak | takes the largest block prefetch + 1 times | times the largest block
def most_whole(root, blocks, prefetch):
    return root + (prefetch + 1) * max(blocks)


# %% check_peak | counts the blocks ahead and not the one that computes | that computes is not counted
def most_whole(root, blocks, prefetch):
    return root + max(sum(blocks[i + 1 : i + 1 + prefetch]) for i in range(len(blocks)))


# %% check_peak | adds up the largest blocks wherever they are | wherever they stand
def most_whole(root, blocks, prefetch):
    return root + sum(sorted(blocks)[-(prefetch + 1) :])


# %% check_peak | looks at full windows alone, and a large prefetch has none | shorter near the end
def most_whole(root, blocks, prefetch):
    windows = range(len(blocks) - prefetch)
    return root + max(sum(blocks[i : i + prefetch + 1]) for i in windows)


# %% check_peak | leaves out the last full window | last group of full length is left out
def most_whole(root, blocks, prefetch):
    last = max(1, len(blocks) - prefetch - 1)
    return root + max(sum(blocks[i : i + prefetch + 1]) for i in range(last))


# %% check_peak | counts the blocks before the one that computes, too | Prefetch goes both ways here
def most_whole(root, blocks, prefetch):
    places = range(len(blocks))
    return root + max(sum(blocks[max(0, i - prefetch) : i + prefetch + 1]) for i in places)


# %% check_peak | at the end it gathers the first blocks again | goes on with the first ones
def most_whole(root, blocks, prefetch):
    twice = blocks + blocks
    return root + max(sum(twice[i : i + prefetch + 1]) for i in range(len(blocks)))


# %% check_peak | right: differences of running sums |
def most_whole(root, blocks, prefetch):
    sums = [0]
    for block in blocks:
        sums.append(sums[-1] + block)
    before = [0] * (prefetch + 1) + sums
    return root + max(after - start for after, start in zip(sums, before))


# %% check_peak | right: walks through the list and calls itself |
def most_whole(root, blocks, prefetch):
    if not blocks:
        return root
    here = root + sum(blocks[: prefetch + 1])
    return max(here, most_whole(root, blocks[1:], prefetch))


# %% check_prefetch | gathers each layer when it is needed | has not begun when layer
def forward_ahead(layers, x, prefetch):
    for layer in layers:
        layer.gather()
        layer.wait()
        x = layer.forward(x)
        layer.free()
    return x


# %% check_prefetch | gathers one layer too many ahead | begins before layer 0 has computed and was freed
def forward_ahead(layers, x, prefetch):
    started = 0
    for i, layer in enumerate(layers):
        while started < min(i + prefetch + 2, len(layers)):
            layers[started].gather()
            started += 1
        layer.wait()
        x = layer.forward(x)
        layer.free()
    return x


# %% check_prefetch | gathers the whole window for each layer | is gathered a second time
def forward_ahead(layers, x, prefetch):
    for i, layer in enumerate(layers):
        for ahead in layers[i : i + prefetch + 1]:
            ahead.gather()
        layer.wait()
        x = layer.forward(x)
        layer.free()
    return x


# %% check_prefetch | reads behind the end of the list of layers | near the end fewer than prefetch are left
def forward_ahead(layers, x, prefetch):
    for layer in layers[:prefetch]:
        layer.gather()
    for i, layer in enumerate(layers):
        layers[i + prefetch].gather()
        layer.wait()
        x = layer.forward(x)
        layer.free()
    return x


# %% check_prefetch | frees a layer only after the next gather has started | freed only after the gather
def forward_ahead(layers, x, prefetch):
    for layer in layers[: prefetch + 1]:
        layer.gather()
    for i, layer in enumerate(layers):
        layer.wait()
        x = layer.forward(x)
        if i + prefetch + 1 < len(layers):
            layers[i + prefetch + 1].gather()
        layer.free()
    return x


# %% check_prefetch | starts the next gather after the layer has computed | has not begun when layer
def forward_ahead(layers, x, prefetch):
    for layer in layers[: max(1, prefetch)]:
        layer.gather()
    for i, layer in enumerate(layers):
        layer.wait()
        x = layer.forward(x)
        layer.free()
        if i + max(1, prefetch) < len(layers):
            layers[i + max(1, prefetch)].gather()
    return x


# %% check_prefetch | never frees the last layers, behind which none is left | are still there at the end
def forward_ahead(layers, x, prefetch):
    for layer in layers[:prefetch]:
        layer.gather()
    for i, layer in enumerate(layers):
        if i + prefetch < len(layers):
            layers[i + prefetch].gather()
        layer.wait()
        x = layer.forward(x)
        if i + prefetch < len(layers):
            layer.free()
    return x


# %% check_prefetch | frees a layer before it computes | and its weight was freed before
def forward_ahead(layers, x, prefetch):
    for layer in layers[:prefetch]:
        layer.gather()
    for i, layer in enumerate(layers):
        for ahead in layers[i + prefetch : i + prefetch + 1]:
            ahead.gather()
        layer.wait()
        layer.free()
        x = layer.forward(x)
    return x


# %% check_prefetch | right: an iterator gathers, and a list holds what is under way |
def forward_ahead(layers, x, prefetch):
    rest, under_way = iter(layers), []

    def start_one():
        for layer in rest:
            layer.gather()
            under_way.append(layer)
            return

    for _ in range(prefetch):
        start_one()
    for _ in layers:
        start_one()
        layer = under_way.pop(0)
        layer.wait()
        x = layer.forward(x)
        layer.free()
    return x


# %% check_sharded_pass | forgets the second gather, for backward | so gather it a second time
def unshard(layer):
    layer.flat.untyped_storage().resize_(layer.flat.numel() * layer.flat.element_size())
    layer.flat[layer.owned] = layer.shard
    ring.all_gather(layer.flat)


def reshard(layer):
    layer.flat.untyped_storage().resize_(0)


def forward_backward(layers, x):
    for layer in layers:
        unshard(layer)
        x = layer.forward(x)
        reshard(layer)
    grad = torch.ones_like(x)
    for layer in reversed(layers):
        grad = layer.backward(grad)
        layer.grad_shard = ring.reduce_scatter(layer.grad).clone()
        layer.grad = None


# %% check_sharded_pass | the storage comes back with as many bytes as there are numbers | resize_ takes bytes
def unshard(layer):
    layer.flat.untyped_storage().resize_(layer.flat.numel())
    layer.flat[layer.owned] = layer.shard
    ring.all_gather(layer.flat)


def reshard(layer):
    layer.flat.untyped_storage().resize_(0)


def forward_backward(layers, x):
    for layer in layers:
        unshard(layer)
        x = layer.forward(x)
        reshard(layer)
    grad = torch.ones_like(x)
    for layer in reversed(layers):
        unshard(layer)
        grad = layer.backward(grad)
        reshard(layer)
        layer.grad_shard = ring.reduce_scatter(layer.grad).clone()
        layer.grad = None


# %% check_sharded_pass | the shard is copied to the beginning of the buffer | Put layer.shard into layer.flat
def unshard(layer):
    layer.flat.untyped_storage().resize_(layer.flat.nbytes)
    layer.flat[: layer.shard.numel()] = layer.shard
    ring.all_gather(layer.flat)


def reshard(layer):
    layer.flat.untyped_storage().resize_(0)


def forward_backward(layers, x):
    for layer in layers:
        unshard(layer)
        x = layer.forward(x)
        reshard(layer)
    grad = torch.ones_like(x)
    for layer in reversed(layers):
        unshard(layer)
        grad = layer.backward(grad)
        reshard(layer)
        layer.grad_shard = ring.reduce_scatter(layer.grad).clone()
        layer.grad = None


# %% check_sharded_pass | layer.grad is left there after it was reduced | still hold whole gradients
def unshard(layer):
    layer.flat.untyped_storage().resize_(layer.flat.nbytes)
    layer.flat[layer.owned] = layer.shard
    ring.all_gather(layer.flat)


def reshard(layer):
    layer.flat.untyped_storage().resize_(0)


def forward_backward(layers, x):
    for layer in layers:
        unshard(layer)
        x = layer.forward(x)
        reshard(layer)
    grad = torch.ones_like(x)
    for layer in reversed(layers):
        unshard(layer)
        grad = layer.backward(grad)
        reshard(layer)
        layer.grad_shard = ring.reduce_scatter(layer.grad).clone()


# %% check_sharded_pass | frees the weights only after the whole forward pass | layers were whole at the same
def unshard(layer):
    layer.flat.untyped_storage().resize_(layer.flat.nbytes)
    layer.flat[layer.owned] = layer.shard
    ring.all_gather(layer.flat)


def reshard(layer):
    layer.flat.untyped_storage().resize_(0)


def forward_backward(layers, x):
    for layer in layers:
        unshard(layer)
        x = layer.forward(x)
    for layer in layers:
        reshard(layer)
    grad = torch.ones_like(x)
    for layer in reversed(layers):
        unshard(layer)
        grad = layer.backward(grad)
        reshard(layer)
        layer.grad_shard = ring.reduce_scatter(layer.grad).clone()
        layer.grad = None


# %% check_sharded_pass | reduces the gradients after all of backward | whole gradients wait in layer.grad
def unshard(layer):
    layer.flat.untyped_storage().resize_(layer.flat.nbytes)
    layer.flat[layer.owned] = layer.shard
    ring.all_gather(layer.flat)


def reshard(layer):
    layer.flat.untyped_storage().resize_(0)


def forward_backward(layers, x):
    for layer in layers:
        unshard(layer)
        x = layer.forward(x)
        reshard(layer)
    grad = torch.ones_like(x)
    for layer in reversed(layers):
        unshard(layer)
        grad = layer.backward(grad)
        reshard(layer)
    for layer in layers:
        layer.grad_shard = ring.reduce_scatter(layer.grad).clone()
        layer.grad = None


# %% check_sharded_pass | puts a new tensor into layer.flat | flat has another storage
def unshard(layer):
    layer.flat = torch.empty_like(layer.flat)
    layer.flat[layer.owned] = layer.shard
    ring.all_gather(layer.flat)


def reshard(layer):
    layer.flat.untyped_storage().resize_(0)


def forward_backward(layers, x):
    for layer in layers:
        unshard(layer)
        x = layer.forward(x)
        reshard(layer)
    grad = torch.ones_like(x)
    for layer in reversed(layers):
        unshard(layer)
        grad = layer.backward(grad)
        reshard(layer)
        layer.grad_shard = ring.reduce_scatter(layer.grad).clone()
        layer.grad = None


# %% check_sharded_pass | divides the summed gradient by the number of ranks | Each grad_shard is the mean
def unshard(layer):
    layer.flat.untyped_storage().resize_(layer.flat.nbytes)
    layer.flat[layer.owned] = layer.shard
    ring.all_gather(layer.flat)


def reshard(layer):
    layer.flat.untyped_storage().resize_(0)


def forward_backward(layers, x):
    ranks = layers[0].flat.numel() // layers[0].shard.numel()
    for layer in layers:
        unshard(layer)
        x = layer.forward(x)
        reshard(layer)
    grad = torch.ones_like(x)
    for layer in reversed(layers):
        unshard(layer)
        grad = layer.backward(grad)
        reshard(layer)
        layer.grad_shard = ring.reduce_scatter(layer.grad) / ranks
        layer.grad = None


# %% check_sharded_pass | right: calls itself for the layers behind the first |
from contextlib import contextmanager


@contextmanager
def whole(layer):
    storage = layer.flat.untyped_storage()
    storage.resize_(layer.flat.numel() * 8)
    layer.flat[layer.owned].copy_(layer.shard)
    ring.all_gather(layer.flat)
    yield
    storage.resize_(0)


def forward_backward(layers, x):
    if not len(layers):
        return torch.ones_like(x)
    layer, *rest = layers
    with whole(layer):
        output = layer.forward(x)
    grad = forward_backward(rest, output)
    with whole(layer):
        grad = layer.backward(grad)
    layer.grad_shard = 1 * ring.reduce_scatter(layer.grad)
    del layer.grad
    return grad
