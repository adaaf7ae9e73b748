"""Layout: where each parameter lies in a flat buffer, and where the buffer is cut into shards."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import nn

from zerolab.unit.span import Span

ALIGNMENT_BYTES = 64
"""Every parameter and every shard starts on such a boundary, as torch's own allocations do: with weights that
start elsewhere, small CPU matrix products take another kernel and the last bits differ from plain PyTorch's.
"""


@dataclass(frozen=True)
class Layout:
    """The places of one unit's parameters, one after the other, and the shards.

    Attributes:
        spans: the place of each parameter.
        padded_numel: how many elements the buffer has, with the padding between and after the parameters.
        shards: into how many shards it is cut.
        shard_numel: how many elements the largest of them has.
        cuts: where each shard begins, and where the last one ends; None where they are equal.
    """

    spans: list[Span]
    padded_numel: int
    shards: int
    shard_numel: int
    cuts: list[int] | None

    @classmethod
    def of(
        cls,
        named_parameters: list[tuple[str, nn.Parameter]],
        dtype: torch.dtype,
        shards: int,
        owners: Sequence[int] | None = None,
    ) -> Self:
        """Place parameters in a buffer of ``dtype``. Padding at the end makes shards equal.

        Args: owners: of each parameter, in ascending order, the shard that holds it whole. Then shards are
            cut between parameters, and differ. Without it they are cut anywhere.
        """
        align = ALIGNMENT_BYTES // dtype.itemsize
        spans: list[Span] = []
        stops = [0]
        for name, parameter in named_parameters:
            spans.append(Span.of(name, parameter, stops[-1]))
            stops.append(stops[-1] + _round_up(parameter.numel(), align))
        if owners is None:
            shard_numel = _round_up(math.ceil(stops[-1] / shards), align)
            return cls(spans, shard_numel * shards, shards, shard_numel, None)
        cuts = [stops[bisect_left(owners, rank)] for rank in range(shards + 1)]
        largest = max(stop - start for start, stop in pairwise(cuts))
        return cls(spans, stops[-1], shards, largest, cuts)

    @property
    def numel(self) -> int:
        """How many elements the parameters have, without padding."""
        return sum(span.numel for span in self.spans)

    def refuse_parts(self, owned: slice, name: str) -> None:
        """Raises: ValueError where ``owned`` has a part of a parameter that one rank has to update whole."""
        for span in self.spans if self.cuts is not None else []:
            part = span.within(owned.start, owned.stop)
            if part.stop - part.start not in (0, span.numel):
                raise ValueError(
                    f"elements {owned.start} to {owned.stop} of unit {name} have only a part of {span.name}, "
                    "and its optimizer updates whole parameters: take the range that Stage.share returns"
                )


def _round_up(numel: int, multiple: int) -> int:
    return math.ceil(numel / multiple) * multiple
