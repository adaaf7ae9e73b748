"""Slices: one rank's part of each parameter, as the parameter that a stock optimizer updates."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

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
    everywhere. It has one dimension, or the parameter's own form where one rank owns it whole.
    """

    unit: FlatUnit
    span: Span
    part: slice
    tensor: nn.Parameter
    state_bytes_per_element: float

    @property
    def whole(self) -> bool:
        """Whether its optimizer updates whole parameters, so that it is all of its parameter or nothing."""
        return self.unit.cuts is not None

    def formed(self, part: torch.Tensor) -> torch.Tensor:
        """Return a view of one value for each of its elements, in its form."""
        return formed(self.unit, self.span, part)

    @property
    def excess_bytes(self) -> float:
        """How much more optimizer state it has than an even share, as in the formula; negative if less.

        A whole parameter has no even share: the formula takes the parameters that the rank owns.
        """
        if not self.span.numel or self.whole:
            return 0.0
        even_numel = self.span.numel * self.unit.shard.numel() / self.unit.padded_numel
        return (self.tensor.numel() - even_numel) * self.state_bytes_per_element


def cut(
    units: list[FlatUnit], parameters: list[nn.Parameter], state_bytes: Callable[[nn.Parameter], float]
) -> list[Slice]:
    """This rank's slice of each parameter. A frozen one's is empty: it costs no optimizer state."""
    places = {id(span.parameter): (unit, span) for unit in units for span in unit.spans}
    slices = []
    for parameter in parameters:
        unit, span = places[id(parameter)]
        part = span.within(unit.owned.start, unit.owned.stop) if unit.trainable else slice(0, 0)
        updated = unit.master if unit.trainable else torch.empty(0)
        with allocated(updated):
            tensor = nn.Parameter(formed(unit, span, updated[part]), requires_grad=unit.trainable)
            vars(tensor).update(attributes_of(parameter))
        slices.append(Slice(unit, span, part, tensor, state_bytes(parameter)))
    return slices


def attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """Return what a class may read of a parameter, such as a factor for its learning rate; no tensors."""
    return {key: value for key, value in vars(parameter).items() if not isinstance(value, torch.Tensor)}


def formed(unit: FlatUnit, span: Span, part: torch.Tensor) -> torch.Tensor:
    """Return a view of part of a parameter's elements: in its form, where that is a whole one of ``unit``."""
    if unit.cuts is None or part.numel() != span.numel:
        return part
    return part.as_strided(span.layout.shape, span.layout.stride(), part.storage_offset())


def in_memory_order(values: torch.Tensor) -> torch.Tensor:
    """Return a view of the elements of a dense tensor in one dimension, in the order of its memory."""
    return values.as_strided((values.numel(),), (1,), values.storage_offset())


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
