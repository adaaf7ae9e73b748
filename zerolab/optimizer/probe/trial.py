"""Trial: step a few small parameters as in one process, or as on several ranks."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch
from torch import nn

from zerolab.optimizer.groups import options_of
from zerolab.optimizer.probe.given import gradient
from zerolab.optimizer.probe.values import equal

Places = list[list[tuple[int, slice]]]
"""For each optimizer of a trial, the parameters that it updates, by index, and which part of each."""
WHOLE = slice(None)

RANDOM = "it draws random numbers, and every rank would draw others"
DIFFERENT_EACH_TIME = (
    "two equal runs of it differ: it draws random numbers, or keeps something outside its objects"
)
ACROSS = "its update of a parameter depends on its other parameters"


class Plan(NamedTuple):
    """What to try an optimizer on: parameters, and the kind of gradients in each step.

    Attributes:
        shapes: of each parameter.
        scales: the largest initial value of each parameter.
        groups: the number of each parameter's group.
        unused: of some kinds, the parameters that have no gradient.
    """

    shapes: tuple[tuple[int, ...], ...]
    scales: tuple[float, ...]
    groups: tuple[int, ...]
    kinds: tuple[str, ...]
    unused: Mapping[str, Collection[int]] = {}

    @property
    def together(self) -> Places:
        """As in a single process: every parameter, in one optimizer."""
        return [[(index, WHOLE) for index in range(len(self.shapes))]]

    @property
    def apart(self) -> Places:
        """Every parameter in an optimizer of its own."""
        return [[(index, WHOLE)] for index in range(len(self.shapes))]


class Held(NamedTuple):
    """A parameter, or a slice of one, with the optimizer that it is in."""

    index: int  # type: ignore[assignment]  # it hides tuple.index, which nobody calls here
    part: slice
    tensor: nn.Parameter
    optimizer: torch.optim.Optimizer
    group: dict

    @property
    def state(self) -> dict:
        return self.optimizer.state.get(self.tensor, {})


class Trial:
    """One run of an optimizer over a plan's parameters, divided among several of its kind by ``places``.

    Each optimizer has all groups, some of them empty, as on a rank.
    """

    def __init__(self, build: Callable[[list], torch.optim.Optimizer], plan: Plan, places: Places):
        self.plan = plan
        self.held: list[Held] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        for each in places:
            tensors = [(index, part, _initial(plan, index, part)) for index, part in each]
            groups: list[list[nn.Parameter]] = [[] for _ in range(max(plan.groups) + 1)]
            for index, _, tensor in tensors:
                groups[plan.groups[index]].append(tensor)
            optimizer = build(groups)
            for group in optimizer.param_groups[1:]:
                _halve_rate(group)
            self.optimizers.append(optimizer)
            built = optimizer.param_groups
            self.held += [Held(*each, optimizer, built[plan.groups[each[0]]]) for each in tensors]

    def step(self, gradients: list[torch.Tensor | None], *closure: Callable) -> None:
        """One training step, in which every optimizer is stepped once."""
        for each in self.held:
            given = gradients[each.index]
            each.tensor.grad = None if given is None else given[each.part].clone().view(each.tensor.shape)
        for optimizer in self.optimizers:
            optimizer.step(*closure)

    def weights(self) -> list[torch.Tensor]:
        """[numel] each parameter, its slices joined."""
        pieces: list[list[torch.Tensor]] = [[] for _ in self.plan.shapes]
        for each in self.held:
            pieces[each.index].append(each.tensor.detach().view(-1))
        return [torch.cat(each) for each in pieces]

    def gradients(self, step: int) -> list[torch.Tensor | None]:
        """[numel] the next gradient of each parameter, None for one that is unused."""
        kind = self.plan.kinds[step]
        unused = self.plan.unused.get(kind, ())
        return [
            None if index in unused else gradient(kind, step, weight, index)
            for index, weight in enumerate(self.weights())
        ]


def _initial(plan: Plan, index: int, part: slice) -> nn.Parameter:
    numel = math.prod(plan.shapes[index])
    values = torch.linspace(-1.0, 1.0, numel + 1, dtype=torch.float32)[:numel] * plan.scales[index]
    return nn.Parameter(values.view(plan.shapes[index]) if part == WHOLE else values[part].clone())


def _halve_rate(group: dict) -> None:
    """Make the second group differ from the first, so that an optimizer that reads the wrong one is found."""
    if isinstance(group.get("lr"), float):
        group["lr"] /= 2


def cause(make: Callable[[Places], Trial], plan: Plan, last: int) -> str:
    """Find why runs differed after the step ``last``: step whole parameters in separate optimizers.

    Nothing, where these leave the same values as one optimizer for all.
    """
    runs = [make(plan.together), make(plan.together), make(plan.apart)]
    random = torch.get_rng_state()
    for step in range(last + 1):
        for run in runs:
            run.step(run.gradients(step))
    expected, again, apart = (run.weights() for run in runs)
    if not equal(expected, again):
        return DIFFERENT_EACH_TIME if equal(random, torch.get_rng_state()) else RANDOM
    return "" if equal(expected, apart) else ACROSS


def differing_option(first: dict, second: dict) -> str:
    """What an optimizer writes into its groups must be the same in all: one of them is shown and saved."""
    expected, found = options_of(first), options_of(second)
    for key in expected | found:
        if key not in expected or key not in found or not equal(expected[key], found[key]):
            return key
    return ""
