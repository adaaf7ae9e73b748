"""What a rank held during lesson 06's exercise, and what of it was too much."""

from typing import NamedTuple

import torch

from zerolab.course.attempts import Odd
from zerolab.course.lessons.zero_stage_3.layers import DEPTH, ShardedLayer, weight_of

_FREES = "layer.flat.untyped_storage().resize_(0) frees"


class Seen(NamedTuple):
    """What one rank was left with, and what its layers saw."""

    peak: int
    left_whole: list[int]
    left_grads: list[int]
    shards: list[torch.Tensor | Odd]
    storage_bytes: list[int]
    copies: int
    copy_name: str | None
    kept_gradient: bool
    unreduced: int
    out_of_order: str | None
    lost: str | None
    reshaped: int | None
    elsewhere: dict[int, dict[str, torch.Tensor]]  # by layer without a grad_shard: what else it has


def elsewhere(layers: list[ShardedLayer], result: object) -> dict[int, dict[str, torch.Tensor]]:
    """The tensors of layers without a grad_shard, by name, and those that the function returned."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    known = ("flat", "shard", "_input")
    made = list(result) if isinstance(result, list | tuple) and len(result) == len(layers) else []
    for layer in layers:
        if layer.grad_shard is not None:
            continue
        named = {f"layer.{name}": value for name, value in vars(layer).items() if name not in known}
        named |= {"what your function returned": made[layer.index]} if made else {}
        found[layer.index] = {
            name: value.detach().clone() for name, value in named.items() if isinstance(value, torch.Tensor)
        }
    return found


def lost_parameters(layers: list[ShardedLayer]) -> str | None:
    """Whether a layer's shard no longer holds the parameters, and what it holds."""
    for layer in layers:
        shard, right = layer.shard, weight_of(layer.index)[layer.owned]
        if not isinstance(shard, torch.Tensor) or not shard.untyped_storage().nbytes():
            now = "nothing"
        elif shard.shape == right.shape and torch.equal(shard.to(right.dtype), right):
            continue
        elif not shard.any():
            now = "zeros"
        else:
            now = "the gradient" if _same(shard, layer.grad_shard) else "other numbers"
        return (
            f"layer {layer.index}'s shard holds {now} now, and the layer's parameters are lost: leave "
            "layer.shard as it is, and set layer.grad_shard to a tensor of its own"
        )
    return None


def _same(shard: torch.Tensor, gradient: object) -> bool:
    return isinstance(gradient, torch.Tensor) and shard.dtype == gradient.dtype and shard.equal(gradient)


def too_much_memory(rank: int, seen: Seen) -> str | None:
    """What a rank held too much of while it computed, or holds at the end."""
    return _whole_layers(rank, seen) or _gradients(rank, seen) or _copies(rank, seen)


def _whole_layers(rank: int, seen: Seen) -> str | None:
    still = f"on rank {rank} the layers {seen.left_whole} are still whole at the end"
    if seen.reshaped is not None:
        return (
            f"layer {seen.reshaped}'s flat has another length on rank {rank}, and its storage still has its "
            f"bytes: Tensor.resize_ changes the shape. {_FREES}"
        )
    if seen.left_whole and seen.peak == DEPTH:
        return f"{still}: they were never freed. Call reshard after every use. {_FREES}"
    if seen.peak == DEPTH:
        return (
            f"all {DEPTH} layers were whole at the same time, which is stage 2's memory: unshard a layer "
            "just before it computes, and reshard it just after"
        )
    if seen.peak > 1:
        return f"{seen.peak} layers were whole at the same time: one is enough here"
    return f"{still}: reshard after backward too" if seen.left_whole else None


def _gradients(rank: int, seen: Seen) -> str | None:
    if seen.left_grads:
        return f"layers {seen.left_grads} still hold whole gradients: set layer.grad = None once reduced"
    if seen.unreduced:
        wait = "a whole gradient waits" if seen.unreduced == 1 else f"{seen.unreduced} whole gradients wait"
        return (
            f"on rank {rank} {wait} in layer.grad while another layer computes: reduce a layer's gradient, "
            "and set layer.grad = None, before the next layer's backward"
        )
    for index, (shard, behind) in enumerate(zip(seen.shards, seen.storage_bytes, strict=True)):
        if isinstance(shard, torch.Tensor) and behind > shard.nbytes:
            return f"layer {index}'s grad_shard is a view, which keeps the whole gradient in memory: clone it"
    return None


def _copies(rank: int, seen: Seen) -> str | None:
    name = f", in `{seen.copy_name}`" if seen.copy_name else ""
    if seen.kept_gradient:
        return (
            f"on rank {rank} a whole gradient is still in memory when the next layer is gathered{name}. "
            "layer.grad = None is not enough while a variable names the gradient, or the view of it that "
            "ring.reduce_scatter returned: keep the clone alone"
        )
    if seen.copies:
        many = "1 more tensor" if seen.copies == 1 else f"{seen.copies} more tensors"
        return (
            f"on rank {rank} {many} of a whole weight's size {'is' if seen.copies == 1 else 'are'} in "
            f"memory{name}: a copy of a weight or of its gradient takes what freeing layer.flat saves"
        )
    return None
