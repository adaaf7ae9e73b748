"""Lesson 03's exercise: the gradients of the ranks, in all cases."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from zerolab.course.evidence import sum_of

# The gate and the mixer lack a gradient in some cases. They are not the last, so that zeros at the end do not
# stand for them, and have one shape, so that one tensor of zeros could stand for both.
SHAPES = {"weight": (8, 6), "gate": (4, 4), "mixer": (4, 4), "bias": (8,)}
SIZES = [torch.Size(shape).numel() for shape in SHAPES.values()]
PSI = sum(SIZES)


class Case(NamedTuple):
    """Tokens by rank; the rank that lacks gradients, and which; the one whose weight gradient is turned."""

    meaning: str
    counts: tuple[int, ...]
    gap: int | None = None
    missing: tuple[str, ...] = ()
    transposed: int | None = None
    dtype: torch.dtype = torch.float64

    def lacks(self, name: str, rank: int) -> bool:
        return rank == self.gap and name in self.missing

    def brought(self) -> list[torch.Tensor]:
        """By rank: the gradients end to end, with zeros for those that are missing."""
        return [
            flat(gradient(name, rank, self.dtype) * (not self.lacks(name, rank)) for name in SHAPES)
            for rank in range(len(self.counts))
        ]


CASES = (
    Case("3 ranks with 30, 10 and 20 tokens", (30, 10, 20)),
    Case("2 ranks with 8 tokens each", (8, 8)),
    Case("2 ranks, and no gradient for the gate on rank 1", (8, 24), 1, ("gate",)),
    Case("2 ranks, and no gradient for the gate and the mixer on rank 0", (8, 24), 0, ("gate", "mixer")),
    Case("2 ranks, and a transposed weight gradient on rank 1", (8, 24), transposed=1),
    Case("4 ranks with 1, 2, 3 and 4 tokens", (1, 2, 3, 4)),
    Case("2 ranks, and gradients in float32", (8, 24), dtype=torch.float32),
    Case("1 rank", (8,)),
)


def gradient(name: str, rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return the gradient that rank brings for a parameter: different for every rank and element."""
    return _numbers(name, 100 * rank, dtype)


def parameter(name: str, rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return the values of a rank's parameter, other numbers than its gradient's."""
    return _numbers(name, 100 * rank + 50, dtype)


def _numbers(name: str, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64).to(dtype)


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def weighted(gradients: list[torch.Tensor], counts: tuple[int, ...]) -> torch.Tensor:
    """Return the sum of the ranks' gradients, each times its count of tokens."""
    return sum_of(count * each for count, each in zip(counts, gradients, strict=True))


def transposed(value: torch.Tensor) -> torch.Tensor:
    """The same, with each parameter of two dimensions in the order of its transposed."""
    pieces = zip(value.split(SIZES), SHAPES.values(), strict=True)
    return flat(piece.view(shape).T if len(shape) == 2 else piece for piece, shape in pieces)
