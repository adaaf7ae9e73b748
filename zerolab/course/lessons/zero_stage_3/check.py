"""Lesson 06's exercise: forward and backward over layers whose weights are freed.

Graded on values, on what is whole when, on what is left at the end, and on bytes.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerolab.course.exercise import Attempt, attempt, graded, total

WIDTH, DEPTH = 6, 4
NUMEL = WIDTH * WIDTH
CASES = (2, 3)
_NO_GATHER = "unshard(layer) comes before layer.forward(x)"
_NO_REGATHER = "it was freed after forward, and backward needs it again, so gather it a second time"
_NOT_FILLED = "not the values: put layer.shard into layer.flat[layer.owned], then all-gather layer.flat"


class ShardedLayer:
    """A linear layer of the exercise: ``y = x @ weight``, whose weight is freed at first.

    Attributes:
        flat: [P] the weight, 0 bytes at first.
        owned: this rank's range of it.
        shard: the values of that range.
        grad: [P] this rank's whole gradient, once backward ran.
        grad_shard: for you to set: the sum over the ranks of ``grad[owned]``.
    """

    def __init__(self, index: int, layers: list["ShardedLayer"]):
        self.index, self.owned = index, owned_by(dist.get_rank(), dist.get_world_size())
        self.flat = weight_of(index)
        self.shard = self.flat[self.owned].clone()
        self.flat.untyped_storage().resize_(0)
        self.grad: torch.Tensor | None = None
        self.grad_shard: torch.Tensor | None = None
        self.whole_at_once = 0  # the most layers that were whole while this one computed
        self._layers = layers
        layers.append(self)

    @property
    def nbytes(self) -> int:
        """The bytes of the weight's storage now: 0 while it is freed."""
        return self.flat.untyped_storage().nbytes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the weight, which must be whole."""
        self._input = x
        return x @ self._weight("forward", _NO_GATHER)

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the input's gradient for the output's, and leave the weight's own in ``self.grad``."""
        weight = self._weight("backward", _NO_REGATHER)
        self.grad = (self._input.T @ grad).flatten()
        return grad @ weight.T

    def _weight(self, phase: str, advice: str) -> torch.Tensor:
        self.whole_at_once = max(self.whole_at_once, sum(layer.nbytes > 0 for layer in self._layers))
        if self.nbytes < self.flat.nbytes:
            raise RuntimeError(f"layer {self.index}'s weight is freed in {phase}: {advice}")
        if not torch.equal(self.flat, weight_of(self.index)):
            raise RuntimeError(f"layer {self.index}'s storage is back in {phase}, but {_NOT_FILLED}")
        return self.flat.view(WIDTH, WIDTH)


class Seen(NamedTuple):
    """What one rank was left with."""

    peak: int
    left_whole: list[int]
    left_grads: list[int]
    shards: list[torch.Tensor | None]
    storage_bytes: list[int]


def owned_by(rank: int, world_size: int) -> slice:
    """The range of a weight that a rank owns."""
    return slice(rank * NUMEL // world_size, (rank + 1) * NUMEL // world_size)


def weight_of(index: int) -> torch.Tensor:
    """The whole weight of a layer, small integers in float64, so that every sum below is exact."""
    return torch.arange(NUMEL, dtype=torch.float64).mul(7 * index + 5).remainder(11).sub(5)


def input_of(rank: int) -> torch.Tensor:
    """A rank's micro-batch, which goes into the first layer."""
    return torch.arange(2 * WIDTH, dtype=torch.float64).add(rank).remainder(5).sub(2).view(2, WIDTH)


@graded(
    "You wrote stage 3: the gradients are right on 2 and 3 ranks, one layer is whole at a time, nothing is "
    "left at the end, and every layer moves 3 times its size."
)
def check_sharded_pass(fn: Callable) -> str | None:
    """Run fn(layers, x) on 2 and 3 ranks and print the mistake it makes, or that it makes none.

    fn runs the layers forward, and backward from a gradient of ones; no more than one may be whole at a time.
    """
    for world_size in CASES:
        outcome = attempt(partial(_pass, fn), [(input_of(rank),) for rank in range(world_size)])
        problem = (
            _failure(outcome)
            or _not_written(outcome)
            or _wrong_memory(outcome.values)
            or _wrong_gradient(outcome.values)
            or _wrong_bytes(outcome)
        )
        if problem:
            return f"{problem} (seen with {world_size} ranks)"
    return None


def _pass(fn: Callable, x: torch.Tensor) -> Seen:
    """In the worker: build the layers, run fn, and look at what is left."""
    layers: list[ShardedLayer] = []
    for index in range(DEPTH):
        ShardedLayer(index, layers)
    fn(list(layers), x)
    shards = [layer.grad_shard for layer in layers]
    return Seen(
        max(layer.whole_at_once for layer in layers),
        [layer.index for layer in layers if layer.nbytes],
        [layer.index for layer in layers if layer.grad is not None],
        [None if shard is None else shard.detach().clone() for shard in shards],
        [0 if shard is None else shard.untyped_storage().nbytes() for shard in shards],
    )


def _failure(outcome: Attempt) -> str | None:
    """What stopped a rank: one of the layers' own errors, or an error or a crash in freed storage."""
    if outcome.failure and any(sign in outcome.failure for sign in ("setStorage", "out of bounds", "signal")):
        return (
            "a rank used a weight whose storage is freed. Bring the storage back with "
            "layer.flat.untyped_storage().resize_(bytes) before you write to layer.flat"
        )
    return outcome.failure and outcome.failure.replace("stopped with RuntimeError: ", "stopped: ")


def _not_written(outcome: Attempt) -> str | None:
    if all(seen.peak == 0 for seen in outcome.values) and not any(outcome.messages):
        return "not written yet: no layer ran and nothing was sent"
    for name in outcome.collectives:
        return f"that calls torch's own {name}: use ring.all_gather and ring.reduce_scatter"
    return None


def _wrong_memory(values: list[Seen]) -> str | None:
    for rank, seen in enumerate(values):
        still = f"on rank {rank} the layers {seen.left_whole} are still whole at the end"
        if seen.left_whole and seen.peak == DEPTH:
            return f"{still}: they were never freed. Call reshard after every use; resize_(0) frees"
        if seen.left_whole:
            return f"{still}: reshard after backward too"
        if seen.peak == DEPTH:
            return (
                f"all {DEPTH} layers were whole at the same time, which is stage 2's memory: unshard a "
                "layer just before it computes, and reshard it just after"
            )
        if seen.peak > 1:
            return f"{seen.peak} layers were whole at the same time: one is enough here"
    return None


def _wrong_gradient(values: list[Seen]) -> str | None:
    own = [true_gradients(rank) for rank in range(len(values))]
    for rank, seen in enumerate(values):
        missing = [index for index, shard in enumerate(seen.shards) if shard is None]
        if missing:
            return f"layers {missing} have no grad_shard: reduce every layer's gradient, not one for all"
        for index, shard in enumerate(shard for shard in seen.shards if shard is not None):
            which = f"layer {index}'s grad_shard"
            problem = _wrong_shard(shard, rank, [gradients[index] for gradients in own])
            if problem:
                return f"{which} on rank {rank} {problem}"
            if seen.storage_bytes[index] > shard.nbytes:
                return f"{which} is a view, which keeps the whole gradient in memory: clone it"
        if seen.left_grads:
            return f"layers {seen.left_grads} still hold whole gradients: set layer.grad = None once reduced"
    return None


def _wrong_shard(shard: torch.Tensor, rank: int, by_rank: list[torch.Tensor]) -> str | None:
    """What is wrong with one layer's shard, given every rank's gradient of that layer."""
    world_size, summed = len(by_rank), total(by_rank)
    mine = owned_by(rank, world_size)
    if shard.shape != summed[mine].shape:
        return f"has {shard.numel()} elements, and a shard has {NUMEL // world_size}"
    if torch.equal(shard, summed[mine]):
        return None
    if torch.equal(shard, by_rank[rank][mine]):
        return "is this rank's own gradient: it was not summed over the ranks"
    if torch.allclose(shard * world_size, summed[mine]):
        return "is the mean; a reduce-scatter leaves the sum, and the update divides once"
    return (
        "is wrong: backward goes from the last layer to the first, each with what the one before it returned"
    )


def true_gradients(rank: int) -> list[torch.Tensor]:
    """One rank's gradients of every layer, by autograd."""
    weights = [weight_of(index).view(WIDTH, WIDTH).requires_grad_() for index in range(DEPTH)]
    x = input_of(rank)
    for weight in weights:
        x = x @ weight
    return [gradient.flatten() for gradient in torch.autograd.grad(x.sum(), weights)]


def _wrong_bytes(outcome: Attempt) -> str | None:
    world_size = len(outcome.values)
    model_bytes = DEPTH * 8 * NUMEL * (world_size - 1) // world_size
    for rank, sent in enumerate(outcome.messages):
        right, bytes_sent = f"the values are right, but rank {rank}", outcome.bytes_sent(rank)
        if any(message.numel >= NUMEL for message in sent):
            return (
                f"{right} sends whole tensors of {NUMEL} elements: a rank sends its own shard, and on a "
                "ring the chunks that it passes on"
            )
        if bytes_sent != 3 * model_bytes:
            return (
                f"{right} sent {bytes_sent} bytes, {bytes_sent / model_bytes:.3g} passes over the model, "
                "where stage 3 makes 3: gather, gather again, reduce-scatter"
            )
    return None
