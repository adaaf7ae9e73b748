"""Batches: which slices of a unit are updated together, by a stock optimizer of their own."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import nn

from zerolab.optimizer.slices import Slice
from zerolab.unit import FlatUnit
from zerolab.unit.span import Span

CONVERTED_TOGETHER = 2**16
"""Elements of gradients that may be converted at a time, where no slice is larger than that."""


def batches(unit: FlatUnit, most_numel: int) -> list[list[Span]]:
    """The parameters of a unit in batches that are updated one after the other, the same in every step.

    One batch where gradients have the dtype of the values that are updated, because the optimizer then uses
    them without a copy. Otherwise they are converted, and this rank's part of a batch has at most
    ``most_numel`` elements, padding included, so that the converted copies take little memory at a time.
    """
    if unit.grads.dtype == unit.master.dtype:
        return [unit.spans]
    found: list[list[Span]] = [[]]
    start = unit.owned.start
    for span in unit.spans:
        if found[-1] and min(span.stop, unit.owned.stop) - start > most_numel:
            found.append([])
            start = max(span.offset, unit.owned.start)
        found[-1].append(span)
    return found


def owned_numel(unit: FlatUnit, span: Span) -> int:
    """How many elements of a parameter this rank updates."""
    part = span.within(unit.owned.start, unit.owned.stop)
    return part.stop - part.start


class Batch:
    """Slices of neighbouring parameters that are updated together, and their stock optimizer.

    Args: groups: options and slices of each of the user's groups; the slices of other batches are left out.
    """

    def __init__(
        self, unit: FlatUnit, spans: list[Span], optimizer_class: type, defaults: dict, groups: list[tuple]
    ):
        self._unit, self._spans = unit, set(spans)
        self._slices: list[Slice] = []
        # one call: a tensor that several groups have stays one tensor
        defaults, options = deepcopy((defaults, [each for each, _ in groups]))
        own = [self._group_of(each, slices) for each, (_, slices) in zip(options, groups, strict=True)]
        self.optimizer = optimizer_class(own, **defaults)
        self._sort()

    def add_group(self, options: dict, slices: list[Slice]) -> None:
        """Another group, empty where all of its parameters are in other batches."""
        self.optimizer.add_param_group(self._group_of(deepcopy(options), slices))
        self._sort()

    def _group_of(self, options: dict, slices: list[Slice]) -> dict:
        mine = [each for each in slices if each.span in self._spans]
        self._slices += mine
        return options | {"params": [each.tensor for each in mine]}

    def step(self, used: set[Span], scale: float) -> None:
        """Update the slices of ``used`` parameters. Those without a gradient are skipped, as in torch."""
        for each, gradient in zip(self._slices, self._gradients(scale), strict=True):
            if each.span in used:
                each.tensor.grad = gradient
        self.optimizer.step()
        for each in self._slices:
            each.tensor.grad = None

    def _gradients(self, scale: float) -> Sequence[torch.Tensor]:
        """The gradient of each slice, in the dtype of the values that are updated.

        Memory: no copy in that dtype, unless they have to be divided by ``scale``.
        """
        if not self._slices:
            return ()
        start, sizes = self._cut
        gradients = self._unit.grads.reduced[start : start + sum(sizes)].to(self._unit.master.dtype)
        if scale != 1:
            gradients = gradients / scale
        return gradients.split_with_sizes(sizes)[::2]

    def _sort(self) -> None:
        """Sort the slices by their place, and note where to cut the gradients: a slice, a gap, and so on."""
        self._slices.sort(key=lambda each: (each.part.start, each.part.stop))
        sizes: list[int] = []
        start = stop = self._slices[0].part.start if self._slices else 0
        for each in self._slices:
            sizes += [each.part.start - stop] * bool(sizes) + [each.part.stop - each.part.start]
            stop = each.part.stop
        self._cut = start, sizes

    def load_state_dict(self, state_dict: dict, numbers: dict[nn.Parameter, int]) -> None:
        """Load this batch's part of the state of all slices, which have these ``numbers`` in it."""
        pairs = zip(state_dict["param_groups"], self.optimizer.param_groups, strict=True)
        groups = [saved | {"params": [numbers[each] for each in own["params"]]} for saved, own in pairs]
        mine = {number for group in groups for number in group["params"]}
        state = {number: values for number, values in state_dict["state"].items() if number in mine}
        self.optimizer.load_state_dict(state_dict | {"state": state, "param_groups": groups})
