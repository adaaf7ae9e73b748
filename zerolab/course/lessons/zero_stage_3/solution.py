"""Solutions of lesson 06's exercises."""

import torch

from zerolab import ring


def unshard(layer):
    layer.flat.untyped_storage().resize_(8 * layer.flat.numel())
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
    # Take out one line at a time and run the check. It says something else for each line.


def forward_ahead(layers, x, prefetch):
    for layer in layers[:prefetch]:
        layer.gather()
    for i, layer in enumerate(layers):
        if i + prefetch < len(layers):
            layers[i + prefetch].gather()  # under way while this layer computes
        layer.wait()
        x = layer.forward(x)
        layer.free()
    return x


def most_whole(root, blocks, prefetch):
    return root + max(sum(blocks[i : i + prefetch + 1]) for i in range(len(blocks)))
