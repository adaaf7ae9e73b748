"""Slices: one rank's part of each parameter, as the parameter that a stock optimizer updates."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from zerolab.optimizer.axes import Axes
from zerolab.stages.base import Stage
from zerolab.storages import allocated
from zerolab.unit import FlatUnit
from zerolab.unit.span import Span


@dataclass(frozen=True, eq=False)
class Slice:
    """This rank's part of one parameter, ``unit.master[part]``; empty where the rank owns none of it.

    There is one for every parameter on every rank, so parameter groups and schedulers mean the same
    everywhere.
    """

    unit: FlatUnit
    span: Span
    part: slice
    tensor: nn.Parameter
    state_bytes_per_element: float

    @property
    def excess_bytes(self) -> float:
        """How much more optimizer state it has than an even share, as in the formula; negative if less."""
        if not self.span.numel:
            return 0.0
        even_numel = self.span.numel * self.unit.shard.numel() / self.unit.padded_numel
        return (self.tensor.numel() - even_numel) * self.state_bytes_per_element


def cut(units: list[FlatUnit], parameters: list[nn.Parameter], state_bytes_per_element: float) -> list[Slice]:
    """This rank's slice of each parameter. A frozen one's is empty: it costs no optimizer state."""
    places = {id(span.parameter): (unit, span) for unit in units for span in unit.spans}
    slices = []
    for parameter in parameters:
        unit, span = places[id(parameter)]
        part = span.within(unit.owned.start, unit.owned.stop) if unit.trainable else slice(0, 0)
        updated = unit.master if unit.trainable else torch.empty(0)
        with allocated(updated):
            tensor = nn.Parameter(updated[part], requires_grad=unit.trainable)
        slices.append(Slice(unit, span, part, tensor, state_bytes_per_element))
    return slices


def disjoint_grads(stage: Stage, units: list[FlatUnit], axes: Axes) -> Iterable[torch.Tensor]:
    """The reduced gradients of this rank's share of every unit, in chunks: each element on one rank only.

    Padding, and parameters that nobody used, are zero in them.
    """
    for unit in units:
        share = stage.share(unit)
        whole = unit.grads.reduced[share.start - unit.owned.start : share.stop - unit.owned.start]
        counted = [span for span in unit.spans if axes.counts(span.parameter)]
        parts = [whole[span.within(share.start, share.stop)] for span in counted]
        for part in [whole] if len(counted) == len(unit.spans) else parts:
            yield from (chunk for chunk in part.split(unit.chunk_numel) if chunk.numel())
