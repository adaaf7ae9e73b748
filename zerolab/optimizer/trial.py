"""Trial: step a few small parameters as in one process, or as on ranks with units.

An optimizer may look at more than one element only now and then: at a gradient of a certain norm or angle to
the weights, after a jump in size, or where a parameter had no gradient. A trial has gradients of each kind.
"""

import math
from collections.abc import Callable
from itertools import pairwise, starmap
from typing import NamedTuple

import torch
from torch import nn

_GROUPS = (0, 1, 0, 1)
_UNITS = ((0, 1), (2,), (3,))
_UNUSED = {"first unit unused": _UNITS[0], "bias unused": (1,)}

Places = list[list[tuple[int, slice]]]
"""For each optimizer of a trial, the parameters that it updates, by index, and which part of each."""
WHOLE = slice(None)
TOGETHER: Places = [[(index, WHOLE) for index in range(len(_GROUPS))]]
"""As in a single process: every parameter, in one optimizer."""
APART: Places = [[(index, WHOLE)] for index in range(len(_GROUPS))]
"""Every parameter in an optimizer of its own."""


class Plan(NamedTuple):
    """What to try an optimizer on: four parameters, and the kind of gradients in each step.

    Attributes:
        shapes: a matrix and a bias in the first unit, a convolution in the second, a scalar in the third.
        scales: the largest initial value of each parameter.
        cuts: at which elements each parameter is cut.
    """

    shapes: tuple[tuple[int, ...], ...]
    scales: tuple[float, ...]
    cuts: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...]

    @property
    def sharded(self) -> Places:
        """As on two ranks with three units, and a unit that has no trainable parameters.

        The second rank has the last piece of each parameter, and the first rank the others.
        """
        pieces = [list(starmap(slice, pairwise((0, *cuts, None)))) for cuts in self.cuts]
        return [
            *([(index, part) for index in unit for part in pieces[index][:-1]] for unit in _UNITS),
            *([(index, pieces[index][-1]) for index in unit] for unit in _UNITS),
            [],
        ]


PLANS = (
    Plan(
        shapes=((6, 7), (11,), (4, 3, 2, 2), ()),
        scales=(1.0, 0.01, 30.0, 1.0),
        cuts=((26,), (0,), (5,), (1,)),  # the first rank has nothing of the bias and all of the scalar
        kinds=(
            *("smooth", "smooth", "small", "large", "parallel", "orthogonal", "orthogonal", "spiky"),
            *("first unit unused", "orthogonal", "zero", "smooth", "large", "bias unused", "small", "spiky"),
            *("parallel", "smooth", "orthogonal", "small", "smooth", "zero", "spiky", "smooth"),
        ),
    ),
    # Some optimizers treat a small matrix like a vector. And some operations, such as sigmoid and pow, round
    # differently in the last elements of a tensor, which do not fill a vector register: a piece of 15 has no
    # other elements, and weights near zero show the last bit of an update.
    Plan(
        shapes=((131, 130), (11,), (4, 3, 2, 2), ()),
        scales=(1e-6, 1e-6, 1e-6, 1e-6),
        cuts=(tuple(range(15, 600, 15)), (0,), (5,), (1,)),
        kinds=("smooth", "spiky", "orthogonal"),
    ),
)
"""The small one is first: it takes milliseconds also for an optimizer that decomposes matrices."""


class Held(NamedTuple):
    """A parameter, or a slice of one, with the optimizer that it is in."""

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
    """One run of an optimizer over a plan's parameters, divided among several of its kind by ``places``."""

    def __init__(self, build: Callable[[list], torch.optim.Optimizer], plan: Plan, places: Places):
        self.held: list[Held] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        for each in places:
            tensors = [(index, part, _initial(plan, index, part)) for index, part in each]
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
        pieces: list[list[torch.Tensor]] = [[] for _ in _GROUPS]
        for each in self.held:
            pieces[each.index].append(each.tensor.detach().view(-1))
        return [torch.cat(each) for each in pieces]


def _initial(plan: Plan, index: int, part: slice) -> nn.Parameter:
    numel = math.prod(plan.shapes[index])
    values = torch.linspace(-1.0, 1.0, numel + 1, dtype=torch.float32)[:numel] * plan.scales[index]
    return nn.Parameter(values.view(plan.shapes[index]) if part == WHOLE else values[part].clone())


def _halve_rate(group: dict) -> None:
    """Make the second group differ from the first, so that an optimizer that reads the wrong one is found."""
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
            return torch.zeros_like(weight)
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
            return across + along * across.norm() * 1e-4  # a part for a projection to remove
    return torch.cos(torch.linspace(step, step + 5.0, numel, dtype=torch.float32)) * (step + 1)
