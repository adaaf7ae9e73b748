"""Lesson 07's exercise on tensor parallelism: an MLP and its parts."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from zerolab.course.evidence import sum_of

RANKS = (3, 2, 4)
SHAPE, WIDTH, HIDDEN = (2, 3), 12, 24  # a batch of sequences; every number of ranks divides the widths
NAMES = ("x", "w1", "b1", "w2", "b2")
NUMEL = SHAPE[0] * SHAPE[1] * WIDTH  # of x, and of the output


class Mlp(NamedTuple):
    """The block's input and its weights, as nn.Linear has them: [outputs, inputs]."""

    x: Tensor
    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    def part(self, rank: int, size: int) -> "Mlp":
        """Cut the first layer by its outputs, and the second by its inputs."""
        w1, b1 = self.w1.chunk(size)[rank], self.b1.chunk(size)[rank]
        return self._replace(w1=w1, b1=b1, w2=self.w2.chunk(size, dim=1)[rank])

    def product(self) -> Tensor:
        """Return what the second layer gives without its bias."""
        return linear(gelu(linear(self.x, self.w1, self.b1)), self.w2)


def inputs(seed: int = 7) -> Mlp:
    """The same on every rank, as leaves that get gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((*SHAPE, WIDTH), (HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,))
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return Mlp(*(tensor.mul(0.5).requires_grad_() for tensor in drawn))


def output_gradient() -> Tensor:
    """Return the gradient that the rest of the model hands back, the same on every rank."""
    generator = torch.Generator().manual_seed(8)
    return torch.randn((*SHAPE, WIDTH), generator=generator, dtype=torch.float64)


class Parts(NamedTuple):
    """What the ranks' parts of the block give, by rank.

    Attributes: mlp: the whole block. products: each rank's share of the output, without b2. gradients: of x,
        w1, b1 and w2, through this rank's part alone; those of weights are zeros beside the part.
    """

    mlp: Mlp
    products: list[Tensor]
    gradients: list[dict[str, Tensor]]

    @property
    def size(self) -> int:
        return len(self.products)

    @property
    def product(self) -> Tensor:
        return sum_of(self.products)

    def whole(self, name: str) -> Tensor:
        """Return the whole block's gradient of a tensor."""
        if name == "b2":
            return output_gradient().sum(dim=(0, 1))
        return sum_of(each[name] for each in self.gradients)


def parts(size: int) -> Parts:
    """Compute every rank's part, without messages."""
    products, gradients = [], []
    for rank in range(size):
        mlp = inputs()
        product = mlp.part(rank, size).product()
        through = torch.autograd.grad(product, mlp[:-1], output_gradient())
        products.append(product.detach())
        gradients.append(dict(zip(NAMES[:-1], through, strict=True)))
    return Parts(Mlp(*(tensor.detach() for tensor in inputs())), products, gradients)


def right(parts: Parts, name: str) -> list[Tensor]:
    """Return the gradient that each rank should end with."""
    if name in ("x", "b2"):
        return [parts.whole(name)] * parts.size
    return [each[name] for each in parts.gradients]
