"""Lesson 06's exercise on stage 3: the shards of gradients that common mistakes lead to."""

from collections.abc import Callable

import torch

from zerolab.course.evidence import sum_of
from zerolab.course.lessons.zero_stage_3.layers import DEPTH, weight_of

Gradients = list[list[torch.Tensor]]  # by rank and layer
Cut = Callable[[int], slice]  # a rank's range of a weight, the rank counted around

# A sentence, and what it leads to: t[rank][layer] is a rank's gradient of layer l, `cut` a rank's range.
# fmt: off
NEVER_FILLED = "each grad_shard was set to zeros and never filled"
MISTAKES: dict[str, Callable[[Gradients, int, int, Cut], torch.Tensor]] = {
    "each grad_shard is this rank's own gradient: it was not summed over the ranks":
        lambda t, layer, r, cut: t[r][layer][cut(r)],
    "each grad_shard is the mean; a reduce-scatter leaves the sum, and the update divides once":
        lambda t, layer, r, cut: total(t, layer)[cut(r)] / len(t),
    "each grad_shard is the whole summed gradient: keep the chunk that ring.reduce_scatter returns":
        lambda t, layer, r, cut: total(t, layer),
    "each grad_shard is this rank's own whole gradient: reduce-scatter it, and keep the chunk":
        lambda t, layer, r, cut: t[r][layer],
    "each grad_shard is the next rank's shard of the sum: take layer.owned":
        lambda t, layer, r, cut: total(t, layer)[cut(r + 1)],
    "each grad_shard is the previous rank's shard of the sum: take layer.owned":
        lambda t, layer, r, cut: total(t, layer)[cut(r - 1)],
    "each grad_shard is rank 0's shard on every rank: take layer.owned":
        lambda t, layer, r, cut: total(t, layer)[cut(0)],
    "each grad_shard was summed over the ranks twice":
        lambda t, layer, r, cut: total(t, layer)[cut(r)] * len(t),
    "the layers' gradients are in reverse order: reduce layer.grad into the same layer's grad_shard":
        lambda t, layer, r, cut: total(t, DEPTH - 1 - layer)[cut(r)],
    "every layer got the first layer's gradient, the last that backward makes: reduce each after its own "
    "backward":
        lambda t, layer, r, cut: total(t, 0)[cut(r)],
    "each grad_shard is a sum of the weight, layer.flat, over the ranks: reduce layer.grad":
        lambda t, layer, r, cut: weight_of(layer)[cut(r)] * len(t),
    "each grad_shard is this rank's shard of the weight: reduce layer.grad":
        lambda t, layer, r, cut: weight_of(layer)[cut(r)],
    "the weight was added to each grad_shard: reduce layer.grad alone":
        lambda t, layer, r, cut: total(t, layer)[cut(r)] + weight_of(layer)[cut(r)],
    NEVER_FILLED:
        lambda t, layer, r, cut: torch.zeros_like(t[r][layer][cut(r)]),
}
# fmt: on


def total(gradients: list[list[torch.Tensor]], layer: int) -> torch.Tensor:
    """A layer's gradient, summed over the ranks."""
    return sum_of(of_rank[layer] for of_rank in gradients)
