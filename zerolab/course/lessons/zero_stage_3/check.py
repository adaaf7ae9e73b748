"""Lesson 06's exercise: forward and backward over layers whose weights are away.

Graded on values, on what is whole when, on what stays behind, and on bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerolab.course.exercise import Attempt, attempt, graded

WIDTH, DEPTH = 6, 4
NUMEL = WIDTH * WIDTH
CASES = (2, 3)


@dataclass
class Witness:
    """How many layers were whole at once, at most, as seen each time that one of them computed."""

    layers: list["ShardedLayer"] = field(default_factory=list)
    peak: int = 0

    def look(self) -> None:
        self.peak = max(self.peak, sum(layer.nbytes > 0 for layer in self.layers))


class ShardedLayer:
    """A linear layer of the exercise: ``y = x @ weight``, and its weight's storage is away.

    Attributes:
        flat: [P] the weight, 0 bytes at first.
        owned: this rank's range of it.
        shard: that range's values.
        grad: [P] this rank's whole gradient, once backward ran.
        grad_shard: for you to set: the sum over the ranks of ``grad[owned]``.
    """

    def __init__(self, index: int, witness: Witness):
        rank, shard_numel = dist.get_rank(), NUMEL // dist.get_world_size()
        self.index, self.owned = index, slice(rank * shard_numel, (rank + 1) * shard_numel)
        self.flat = weight_of(index)
        self.shard = self.flat[self.owned].clone()
        self.flat.untyped_storage().resize_(0)
        self.grad: torch.Tensor | None = None
        self.grad_shard: torch.Tensor | None = None
        self._witness = witness
        witness.layers.append(self)

    @property
    def nbytes(self) -> int:
        """The bytes behind the weight now: 0 while it is away."""
        return self.flat.untyped_storage().nbytes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the weight, which must be whole."""
        self._input = x
        return x @ self._weight("forward", _NO_GATHER)

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        """From the gradient of the output to that of the input; leaves the weight's own in ``self.grad``."""
        weight = self._weight("backward", _NO_REGATHER)
        self.grad = (self._input.T @ grad).flatten()
        return grad @ weight.T

    def _weight(self, phase: str, advice: str) -> torch.Tensor:
        self._witness.look()
        if self.nbytes < self.flat.numel() * self.flat.element_size():
            raise RuntimeError(f"layer {self.index}'s weight is away in {phase}: {advice}")
        if not torch.equal(self.flat, weight_of(self.index)):
            raise RuntimeError(f"layer {self.index}'s storage is back in {phase}, but {_NOT_FILLED}")
        return self.flat.view(WIDTH, WIDTH)


_NO_GATHER = "unshard(layer) comes before layer.forward(x)"
_NO_REGATHER = "it was let go after forward, and backward needs it again, so gather it a second time"
_NOT_FILLED = "not the values: put layer.shard into layer.flat[layer.owned], then all-gather layer.flat"


class Seen(NamedTuple):
    """What one rank was left with."""

    peak: int
    left_whole: list[int]
    left_grads: list[int]
    shards: list[torch.Tensor | None]
    storage_bytes: list[int]


def weight_of(index: int) -> torch.Tensor:
    """The whole weight of a layer, small integers in float64, so that every sum below is exact."""
    return torch.arange(NUMEL, dtype=torch.float64).mul(7 * index + 5).remainder(11).sub(5)


def input_of(rank: int) -> torch.Tensor:
    """What rank puts into the first layer: its own micro-batch."""
    return torch.arange(2 * WIDTH, dtype=torch.float64).add(rank).remainder(5).sub(2).view(2, WIDTH)


@graded(
    "You wrote stage 3: the gradients are right on 2 and 3 ranks, one layer is whole at a time, nothing "
    "stays behind, and every layer moves 3 times its size."
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
    witness = Witness()
    layers = [ShardedLayer(index, witness) for index in range(DEPTH)]
    fn(layers, x)
    shards = [layer.grad_shard for layer in layers]
    return Seen(
        witness.peak,
        [layer.index for layer in layers if layer.nbytes],
        [layer.index for layer in layers if layer.grad is not None],
        [None if shard is None else shard.detach().clone() for shard in shards],
        [0 if shard is None else shard.untyped_storage().nbytes() for shard in shards],
    )


def _failure(outcome: Attempt) -> str | None:
    """The layers' own complaints speak for themselves; touching freed storage is an error or a crash."""
    if outcome.failure and any(sign in outcome.failure for sign in ("setStorage", "out of bounds", "signal")):
        return (
            "a rank touched a weight whose storage is away. Bring the storage back with "
            "layer.flat.untyped_storage().resize_(bytes) before anything is written to layer.flat"
        )
    return outcome.failure and outcome.failure.replace("stopped with RuntimeError: ", "stopped: ")


def _not_written(outcome: Attempt) -> str | None:
    if all(seen.peak == 0 for seen in outcome.values) and not any(outcome.messages):
        return "not written yet: no layer ran and nothing was sent"
    if outcome.collectives:
        return f"that calls torch's own {outcome.collectives[0]}: use ring.all_gather and ring.reduce_scatter"
    return None


def _wrong_memory(values: list[Seen]) -> str | None:
    for rank, seen in enumerate(values):
        still = f"on rank {rank} the layers {seen.left_whole} are still whole at the end"
        if seen.left_whole and seen.peak == DEPTH:
            return f"{still}: they were never let go. reshard follows every use, and resize_(0) frees"
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
            return f"layers {missing} have no grad_shard: every layer's gradient is reduced, not one for all"
        for index, shard in enumerate(seen.shards):
            problem = _wrong_shard(shard, rank, [gradients[index] for gradients in own])
            if problem:
                return f"layer {index}'s grad_shard on rank {rank} {problem}"
            if seen.storage_bytes[index] > shard.nbytes:
                return f"layer {index}'s grad_shard is a view, which keeps the whole gradient alive: clone it"
        if seen.left_grads:
            return f"layers {seen.left_grads} still hold whole gradients: set layer.grad = None once reduced"
    return None


def _wrong_shard(shard: torch.Tensor, rank: int, by_rank: list[torch.Tensor]) -> str | None:
    """What is wrong with one layer's shard, given every rank's gradient of that layer."""
    world_size, total = len(by_rank), sum(by_rank)
    mine = slice(rank * NUMEL // world_size, (rank + 1) * NUMEL // world_size)
    if shard.shape != total[mine].shape:
        return f"has {shard.numel()} elements, and a shard has {NUMEL // world_size}"
    if torch.equal(shard, total[mine]):
        return None
    if torch.equal(shard, by_rank[rank][mine]):
        return "is this rank's own gradient: it was not summed over the ranks"
    if torch.allclose(shard * world_size, total[mine]):
        return "is the mean; a reduce-scatter leaves the sum, and the update divides once"
    return "is wrong: backward goes from the last layer to the first, each passing on what it returned"


def true_gradients(rank: int) -> list[torch.Tensor]:
    """One rank's gradients of every layer, by autograd."""
    weights = [weight_of(index).view(WIDTH, WIDTH).requires_grad_() for index in range(DEPTH)]
    x = input_of(rank)
    for weight in weights:
        x = x @ weight
    return [gradient.flatten() for gradient in torch.autograd.grad(x.sum(), weights)]


def _wrong_bytes(outcome: Attempt) -> str | None:
    world_size = len(outcome.values)
    layer_bytes = 8 * NUMEL * (world_size - 1) // world_size
    allowed = 3 * DEPTH * layer_bytes
    for rank, sent in enumerate(outcome.messages):
        if any(message.numel >= NUMEL for message in sent):
            return (
                f"the values are right, but rank {rank} sends whole tensors of {NUMEL} elements: a rank "
                "sends its own shard, and what it passes on"
            )
        if outcome.bytes_sent(rank) != allowed:
            passes = outcome.bytes_sent(rank) / (DEPTH * layer_bytes)
            return (
                f"the values are right, but rank {rank} sent {outcome.bytes_sent(rank)} bytes, {passes:.3g} "
                "passes over the model, where stage 3 makes 3: gather, gather again, reduce-scatter"
            )
    return None
