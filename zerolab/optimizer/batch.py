"""Batches: the slices of a unit that one stock optimizer updates together."""

import itertools
from collections.abc import Callable
from copy import deepcopy

import torch
from torch import nn
from torch.utils._pytree import tree_map

from zerolab.optimizer.probe.values import tensors_in
from zerolab.optimizer.slices import Slice
from zerolab.optimizer.updates import Update
from zerolab.storages import copy_together
from zerolab.unit import FlatUnit
from zerolab.unit.span import Span

TOGETHER_NUMEL = 2**16
"""Units that have so few elements on this rank together are updated in one call of the optimizer, and so many
gradients may be converted at a time. A call for each small unit would take most of a short step's time.
"""


def updated_together(units: list[FlatUnit], update_of: Callable[[FlatUnit], Update]) -> list[list[FlatUnit]]:
    """The units in their order, in lists of neighbours that one call updates. A large unit has its own.

    Args: update_of: says which stock optimizer updates a unit. Several are never in one list.
    """
    needs = lambda unit: (update_of(unit), unit.master.dtype)
    found: list[list[FlatUnit]] = []
    numel = 0
    for unit in units:
        numel += unit.shard_numel
        if not found or numel > TOGETHER_NUMEL or needs(unit) != needs(found[-1][0]):
            found.append([])
            numel = unit.shard_numel
        found[-1].append(unit)
    return found


def batches(units: list[FlatUnit], most_numel: int) -> list[list[tuple[FlatUnit, list[Span]]]]:
    """Return what is updated together of ``units``, one batch after the other, the same in every step.

    One batch where gradients have the dtype of the values that are updated, because the optimizer then uses
    them without a copy. Otherwise they are converted, and this rank's part of a batch has at most
    ``most_numel`` elements, padding included, so that the converted copies take little memory at a time.
    """
    unit = units[0]
    if len(units) > 1 or unit.grads.dtype == unit.master.dtype:
        return [[(each, each.spans) for each in units]]
    found: list[list[Span]] = [[]]
    start = unit.owned.start
    for span in unit.spans:
        if found[-1] and min(span.stop, unit.owned.stop) - start > most_numel:
            found.append([])
            start = max(span.offset, unit.owned.start)
        found[-1].append(span)
    return [[(unit, spans)] for spans in found]


def owned_numel(unit: FlatUnit, span: Span) -> int:
    """Return how many elements of a parameter this rank updates."""
    part = span.within(unit.owned.start, unit.owned.stop)
    return part.stop - part.start


class Batch:
    """Slices of neighbouring parameters that are updated together, and their stock optimizer.

    Attributes: update: whose stock optimizer it is.

    Args:
        spans: the parameters, by unit.
        update: the class of their optimizer.
        groups: options and slices of each of the user's groups that it updates; the slices of other batches
            are left out, and so are empty ones where it updates whole parameters.
    """

    def __init__(
        self,
        spans: list[tuple[FlatUnit, list[Span]]],
        update: Update,
        groups: list[tuple],
    ):
        self.update = update
        self._units = [unit for unit, _ in spans]
        self._spans = {span for _, of_unit in spans for span in of_unit}
        self._slices: list[Slice] = []
        # one call: a tensor that several groups have stays one tensor
        defaults, options = deepcopy((update.defaults, [each for each, _ in groups]))
        own = [self._group_of(each, slices) for each, (_, slices) in zip(options, groups, strict=True)]
        self.optimizer = update.optimizer_class(own, **defaults)
        self._sort()

    def add_group(self, options: dict, slices: list[Slice]) -> None:
        """Another group, empty where all of its parameters are in other batches."""
        self.optimizer.add_param_group(self._group_of(deepcopy(options), slices))
        self._sort()

    def _group_of(self, options: dict, slices: list[Slice]) -> dict:
        mine = [
            each for each in slices if each.span in self._spans and (each.tensor.numel() or not each.whole)
        ]
        self._slices += mine
        return options | {"params": [each.tensor for each in mine]}

    def step(self, used: set[Span], scale: float) -> None:
        """Update the slices of ``used`` parameters. Those without a gradient are skipped, as in torch."""
        try:
            for each, gradient in zip(self._slices, self._gradients(scale), strict=True):
                if each.span in used:
                    each.tensor.grad = gradient
            self.optimizer.step()
        finally:
            for each in self._slices:
                each.tensor.grad = None

    def _gradients(self, scale: float) -> list[torch.Tensor]:
        """Return the gradient of each slice, in the dtype of the values that are updated.

        Memory: no copy in that dtype, unless they have to be divided by ``scale``.
        """
        found: list[torch.Tensor] = []
        for (_, slices, _, sizes, places), gradients in zip(self._cuts, self._converted(), strict=True):
            if scale != 1:
                gradients = gradients / scale
            cut = gradients.split_with_sizes(sizes)
            found += [each.formed(cut[place]) for each, place in zip(slices, places, strict=True)]
        return found

    def _converted(self) -> list[torch.Tensor]:
        """Return the gradients of each unit's slices, in the dtype of the values that are updated."""
        found, converted = [], []
        for unit, _, part, *_ in self._cuts:
            gradients, dtype = unit.grads.reduced[part], unit.master.dtype
            if gradients.dtype != dtype:
                converted.append((torch.empty_like(gradients, dtype=dtype), gradients))
                gradients = converted[-1][0]
            found.append(gradients)
        copy_together(converted)
        return found

    def _sort(self) -> None:
        """Sort the slices by their place, and note where to cut the gradients of each unit.

        A unit's gradients are cut into slices, and gaps where there is padding between two.
        """
        self._slices.sort(key=lambda each: (self._units.index(each.unit), each.part.start, each.part.stop))
        self._cuts: list[tuple[FlatUnit, list[Slice], slice, list[int], list[int]]] = []
        for unit, of_unit in itertools.groupby(self._slices, key=lambda each: each.unit):
            slices = list(of_unit)
            parts = [each.part for each in slices]
            start = stop = parts[0].start
            sizes: list[int] = []
            places: list[int] = []
            for part in parts:
                if stop < part.start:
                    sizes.append(part.start - stop)
                places.append(len(sizes))
                sizes.append(part.stop - part.start)
                stop = part.stop
            self._cuts.append((unit, slices, slice(start, stop), sizes, places))

    def load_state_dict(
        self,
        state_dict: dict,
        numbers: dict[nn.Parameter, int],
        state_of: Callable[[Slice], dict | None],
    ) -> None:
        """Load the options in a state_dict of all slices, which have these ``numbers``, and own state.

        torch casts state to the dtype of its parameter. Here it keeps the dtype that it was saved in.
        """
        theirs = [state_dict["param_groups"][place] for place in self.update.places]
        pairs = zip(theirs, self.optimizer.param_groups, strict=True)
        groups = [saved | {"params": [numbers[each] for each in own["params"]]} for saved, own in pairs]
        found = {each.tensor: values for each in self._slices if (values := state_of(each)) is not None}
        state = {numbers[tensor]: values for tensor, values in found.items()}
        self.optimizer.load_state_dict(state_dict | {"state": state, "param_groups": groups})
        for tensor, values in found.items():
            _restore_dtypes(self.optimizer.state[tensor], values, tensor.device)


def _restore_dtypes(state: dict, saved: dict, device: torch.device) -> None:
    """Replace what has another dtype than it was saved in."""
    dtypes = lambda value: [tensor.dtype for tensor in tensors_in(value)]
    for key, value in saved.items():
        if dtypes(state.get(key)) != dtypes(value):
            state[key] = tree_map(lambda leaf: leaf.to(device) if torch.is_tensor(leaf) else leaf, value)
