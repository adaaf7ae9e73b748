"""A trial of an optimizer: a few small parameters, stepped as one process has them or as ranks and units do.

The gradients bring out what an optimizer may do rarely, because it looks at a gradient's norm, at its angle
to the weights, at a jump in size, or at how many parameters had a gradient.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

_SHAPES = ((6, 7), (11,), (4, 3, 2, 2), ())
"""A matrix and a bias in the first unit, a convolution in the second, a scalar in the third."""
_LARGE = ((131, 130), *_SHAPES[1:])
"""Some optimizers treat a small matrix like a vector. The lengths are no multiples of a vector register's."""
_SCALES = (1.0, 0.01, 30.0, 1.0)
_GROUPS = (0, 1, 0, 1)
_UNITS = ((0, 1), (2,), (3,))
_FIRST_NUMEL = (26, 0, 5, 1)
"""How much of each parameter the first rank owns: nothing of the bias, all of the scalar."""

WHOLE = slice(None)
TOGETHER = [[(index, WHOLE) for index in range(len(_SHAPES))]]
"""As in a single process: every parameter, in one optimizer."""
APART = [[(index, WHOLE)] for index in range(len(_SHAPES))]
"""Every parameter in an optimizer of its own."""
SHARDED = [
    *([(index, slice(0, _FIRST_NUMEL[index])) for index in unit] for unit in _UNITS),
    *([(index, slice(_FIRST_NUMEL[index], None)) for index in unit] for unit in _UNITS),
    [],
]
"""As on two ranks with three units, and a unit none of whose parameters is trained."""

_UNUSED = {"first unit unused": _UNITS[0], "bias unused": (1,)}


class Plan(NamedTuple):
    """Shapes to try an optimizer on, and the kind of gradients in each step."""

    shapes: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...]


PLANS = (
    Plan(
        _SHAPES,
        (
            *("smooth", "smooth", "small", "large", "parallel", "orthogonal", "orthogonal", "spiky"),
            *("first unit unused", "orthogonal", "zero", "smooth", "large", "bias unused", "small", "spiky"),
            *("parallel", "smooth", "orthogonal", "small", "smooth", "zero", "spiky", "smooth"),
        ),
    ),
    Plan(_LARGE, ("smooth", "spiky", "orthogonal")),
)
"""The small one first: it takes milliseconds also where an optimizer decomposes matrices."""


class Held(NamedTuple):
    """A parameter, or a slice of one, with the optimizer and the group that it is in."""

    index: int  # type: ignore[assignment]  # it hides tuple.index, which nobody calls here
    part: slice
    tensor: nn.Parameter
    optimizer: torch.optim.Optimizer

    @property
    def group(self) -> dict:
        return self.optimizer.param_groups[_GROUPS[self.index]]

    @property
    def state(self) -> dict:
        return self.optimizer.state.get(self.tensor, {})


class Trial:
    """One run of an optimizer over a plan's parameters, divided among optimizers as ``places`` says."""

    def __init__(self, build: Callable[[list], torch.optim.Optimizer], plan: Plan, places: list[list[tuple]]):
        self.kinds = plan.kinds
        self.held: list[Held] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        for each in places:
            tensors = [(index, part, _start(plan.shapes[index], index, part)) for index, part in each]
            groups: list[list[nn.Parameter]] = [[], []]
            for index, _, tensor in tensors:
                groups[_GROUPS[index]].append(tensor)
            optimizer = build(groups)
            _halve_rate(optimizer.param_groups[1])
            self.optimizers.append(optimizer)
            self.held += [Held(*each, optimizer) for each in tensors]

    def step(self, gradients: list[torch.Tensor | None]) -> None:
        """One training step, in which every optimizer is stepped once."""
        for index, part, tensor, _ in self.held:
            gradient = gradients[index]
            tensor.grad = None if gradient is None else gradient[part].clone().view(tensor.shape)
        for optimizer in self.optimizers:
            optimizer.step()

    def weights(self) -> list[torch.Tensor]:
        """[numel] each parameter, its slices joined."""
        pieces: list[list[torch.Tensor]] = [[] for _ in _SHAPES]
        for each in self.held:
            pieces[each.index].append(each.tensor.detach().view(-1))
        return [torch.cat(each) for each in pieces]


def _start(shape: tuple[int, ...], index: int, part: slice) -> nn.Parameter:
    numel = torch.Size(shape).numel()
    values = torch.linspace(-1.0, 1.0, numel + 1, dtype=torch.float32)[:numel] * _SCALES[index]
    return nn.Parameter(values.view(shape) if part == WHOLE else values[part].clone())


def _halve_rate(group: dict) -> None:
    """A second group that is not like the first, so that reading the wrong one is noticed."""
    if isinstance(group.get("lr"), float):
        group["lr"] /= 2


def gradients(kind: str, step: int, weights: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """[numel] a gradient of this kind for each parameter, None for one that is unused."""
    unused = _UNUSED.get(kind, ())
    return [
        None if index in unused else _gradient(kind, step, weight, index)
        for index, weight in enumerate(weights)
    ]


def _gradient(kind: str, step: int, weight: torch.Tensor, index: int) -> torch.Tensor:
    numel, generator = weight.numel(), torch.Generator().manual_seed(100 * step + index)
    noise = torch.randn(numel, generator=generator, dtype=torch.float32)
    match kind:
        case "zero":
            return torch.zeros(numel, dtype=torch.float32)
        case "small":
            return 1e-6 * noise
        case "large":
            return 1e3 * noise
        case "spiky":
            return noise * 10.0 ** (7 * torch.rand(numel, generator=generator, dtype=torch.float32) - 4)
        case "parallel":
            return 0.3 * weight
        case "orthogonal":
            along = weight / weight.norm().clamp(min=1e-12)
            across = noise - along * (noise @ along)
            return across + along * across.norm() * 1e-4  # a part for a projection to take away
    return torch.cos(torch.linspace(step, step + 5.0, numel, dtype=torch.float32)) * (step + 1)
