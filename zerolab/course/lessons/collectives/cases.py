"""The tensors of lesson 02's exercises: how many ranks, elements, and of which type."""

from typing import NamedTuple

import torch

from zerolab import ring
from zerolab.course.wording import count


class Case(NamedTuple):
    """How many ranks, and how long the tensor of each is."""

    world_size: int
    numel: int
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        kind = "" if self.dtype == torch.float64 else f" of {str(self.dtype).removeprefix('torch.')}"
        return f"{count(self.world_size, 'rank')} and {count(self.numel, 'element')}{kind}"

    @property
    def cuts(self) -> list[slice]:
        return ring.chunks(self.numel, self.world_size)

    @property
    def longest(self) -> int:
        """The elements of the longest chunk."""
        return self.cuts[0].stop

    def brought(self, rank: int) -> torch.Tensor:
        """What a rank brings: different for every element and every rank."""
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(self.numel, generator=generator, dtype=torch.float64).to(self.dtype)


# The long ones tell most; where N does not divide, torch.chunk is not ring.chunks. One is in float32, where a
# message in float64 has twice the bytes.
CASES = (
    Case(3, 999),
    Case(4, 1001),
    Case(2, 8),
    Case(4, 9),
    Case(4, 10),
    Case(3, 11, torch.float32),
    Case(1, 5),
)
