"""Lesson 06's exercise on prefetching: layers whose weights are gathered while other layers compute."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from zerolab.course.lessons.zero_stage_3.layers import DEPTH, NUMEL, WIDTH, Use, input_of, owned_by, weight_of


class Moment(NamedTuple):
    """What was called, on which layer, and which layers were whole or on their way afterwards."""

    call: str
    layer: int
    present: tuple[int, ...]


class GatheredLayer:
    """A layer ``y = x @ weight``, which notes what is called in lists that it shares with the others.

    `gather` begins to gather the weight and returns at once; `wait` returns when the weight is there, and a
    second `wait` at once; `free` gives its memory back.
    """

    def __init__(self, index: int, layers: list["GatheredLayer"], moments: list[Moment], uses: list[Use]):
        self.index, self._layers, self._moments, self._uses = index, layers, moments, uses
        self._flat: torch.Tensor | None = None
        self._works: list[dist.Work] | None = None
        self._freed = False
        layers.append(self)

    def gather(self) -> None:
        """Begin to send this rank's shard to all others, and to receive theirs."""
        if self._flat is not None:
            raise RuntimeError(f"layer {self.index} is gathered a second time while it is there")
        rank, size = dist.get_rank(), dist.get_world_size()
        self._freed = False
        own, self._flat = owned_by(rank, size), torch.zeros(NUMEL, dtype=torch.float64)
        self._flat[own] = weight_of(self.index)[own]
        peers = [peer for peer in range(size) if peer != rank]
        pairs = [dist.P2POp(dist.isend, self._flat[own], peer) for peer in peers]
        pairs += [dist.P2POp(dist.irecv, self._flat[owned_by(peer, size)], peer) for peer in peers]
        self._works = dist.batch_isend_irecv(pairs) if pairs else []
        self._note("gather")

    def wait(self) -> None:
        """Return when the weight is there."""
        if self._flat is None:
            before = "it was freed" if self._freed else "call gather() first"
            raise RuntimeError(f"wait: no gather of layer {self.index} is under way: {before}")
        if self._works is None:
            return
        for work in self._works:
            work.wait()
        self._works = None
        self._note("wait")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the weight, which must be there."""
        if self._flat is None:
            why = "was freed before: free a layer after its forward" if self._freed else "was not gathered"
            raise RuntimeError(f"layer {self.index} computes, and its weight {why}")
        if self._works is not None:
            raise RuntimeError(
                f"layer {self.index} computes, and its gather may not be over: call wait() first"
            )
        self._note("forward")
        output = x @ self._flat.view(WIDTH, WIDTH)
        self._uses.append(Use("forward", self.index, x.clone(), output.clone()))
        return output

    def free(self) -> None:
        """Give the weight's memory back."""
        if self._works is not None:
            raise RuntimeError(f"layer {self.index} is freed while it is gathered: call wait() first")
        if self._flat is None:
            why = "it was freed before" if self._freed else "it was not gathered"
            raise RuntimeError(f"layer {self.index} is freed, and it is not there: {why}")
        self._flat, self._freed = None, True
        self._note("free")

    def _note(self, call: str) -> None:
        present = tuple(layer.index for layer in self._layers if layer._flat is not None)
        self._moments.append(Moment(call, self.index, present))


def output_of(rank: int) -> torch.Tensor:
    """Return the right output for a rank's input."""
    x = input_of(rank)
    for index in range(DEPTH):
        x = x @ weight_of(index).view(WIDTH, WIDTH)
    return x
