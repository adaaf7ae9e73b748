"""Batches: which slices of a unit are updated together, by a stock optimizer of their own."""

from copy import deepcopy

from torch import nn

from zerolab.optimizer.slices import Slice
from zerolab.unit import FlatUnit
from zerolab.unit.span import Span


def batches(unit: FlatUnit, most_numel: int) -> list[list[Span]]:
    """The parameters of a unit in batches that are updated one after the other, the same in every step.

    One batch where gradients have the dtype of the values that are updated, because the optimizer then uses
    them without a copy. Otherwise they are converted, and the slices of a batch have at most ``most_numel``
    elements, so that the converted copies take little memory at a time.
    """
    if unit.grads.dtype == unit.master.dtype:
        return [unit.spans]
    found: list[list[Span]] = []
    room: list[int] = []
    for span in unit.spans:
        numel = owned_numel(unit, span)
        place = next((place for place, left in enumerate(room) if numel <= left), len(found))
        if place == len(found):
            found.append([])
            room.append(most_numel)
        found[place].append(span)
        room[place] -= numel
    return found


def owned_numel(unit: FlatUnit, span: Span) -> int:
    """How many elements of a parameter this rank updates."""
    part = span.within(unit.owned.start, unit.owned.stop)
    return part.stop - part.start


class Batch:
    """Slices that are updated together, and their stock optimizer.

    Args: groups: options and slices of each of the user's groups; the slices of other batches are left out.
    """

    def __init__(self, spans: list[Span], optimizer_class: type, defaults: dict, groups: list[tuple]):
        self._spans = set(spans)
        self._slices: list[Slice] = []
        # one call: a tensor that several groups have stays one tensor
        defaults, options = deepcopy((defaults, [each for each, _ in groups]))
        own = [self._group_of(each, slices) for each, (_, slices) in zip(options, groups, strict=True)]
        self.optimizer = optimizer_class(own, **defaults)

    def add_group(self, options: dict, slices: list[Slice]) -> None:
        """Another group, empty where all of its parameters are in other batches."""
        self.optimizer.add_param_group(self._group_of(deepcopy(options), slices))

    def _group_of(self, options: dict, slices: list[Slice]) -> dict:
        mine = [each for each in slices if each.span in self._spans]
        self._slices += mine
        return options | {"params": [each.tensor for each in mine]}

    def step(self, used: set[Span], scale: float) -> None:
        """Update the slices of ``used`` parameters. Those without a gradient are skipped, as in torch."""
        for each in self._slices:
            if each.span in used:
                gradient = each.unit.grads.reduced[each.part].to(each.tensor.dtype)
                each.tensor.grad = gradient if scale == 1 else gradient / scale
        self.optimizer.step()
        for each in self._slices:
            each.tensor.grad = None

    def load_state_dict(self, state_dict: dict, numbers: dict[nn.Parameter, int]) -> None:
        """Load this batch's part of the state of all slices, which have these ``numbers`` in it."""
        pairs = zip(state_dict["param_groups"], self.optimizer.param_groups, strict=True)
        groups = [saved | {"params": [numbers[each] for each in own["params"]]} for saved, own in pairs]
        mine = {number for group in groups for number in group["params"]}
        state = {number: values for number, values in state_dict["state"].items() if number in mine}
        self.optimizer.load_state_dict(state_dict | {"state": state, "param_groups": groups})
