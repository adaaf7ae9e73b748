"""LocalUpdate: a stock torch optimizer over the slices this rank owns."""

import inspect
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import nn

from zerolab.optimizer.probe import state_bytes_per_parameter
from zerolab.optimizer.slices import Slice, cut
from zerolab.unit import FlatUnit
from zerolab.unit.span import Span


class LocalUpdate:
    """Updates this rank's slice of every parameter with an ordinary optimizer of the class given.

    It knows nothing of ranks. Its parameter groups mirror the user's one to one, with a slice for every
    parameter.

    Attributes:
        slices: in the order of the groups.
        members: of each group, the names of its parameters.
        optimizer: the stock optimizer, None before the first group.
    """

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], defaults: dict):
        self.optimizer_class, self.defaults = optimizer_class, defaults
        self.slices: list[Slice] = []
        self.members: list[str] = []
        self._of_unit: dict[FlatUnit, list[Slice]] = defaultdict(list)
        self.optimizer: torch.optim.Optimizer | None = None

    def add_group(self, units: list[FlatUnit], parameters: list[nn.Parameter], options: dict) -> dict:
        """Cut a group's parameters, and hand the slices to the optimizer; the options it filled in."""
        known = inspect.signature(
            self.optimizer_class
        ).parameters  # a group may also have a name of the user's
        own = {key: value for key, value in options.items() if key in known}
        cost = state_bytes_per_parameter(self.optimizer_class, self.defaults | own)
        slices = cut(units, parameters, cost)
        group = options | {"params": [each.tensor for each in slices]}
        if self.optimizer is None:
            self.optimizer = self.optimizer_class([group], **self.defaults)
        else:
            self.optimizer.add_param_group(group)
        self.slices += slices
        self.members.append(", ".join(each.span.name for each in slices))
        for each in slices:
            self._of_unit[each.unit].append(each)
        return options_of(self.optimizer.param_groups[-1])

    def follow(self, groups: list[dict]) -> None:
        """Take over the hyperparameters of the user's groups, as a scheduler may have left them."""
        for theirs, mine in zip(self.optimizer.param_groups, groups, strict=True):
            theirs.update(options_of(mine))

    def step(self, unit: FlatUnit, used: set[Span], scale: float = 1.0) -> None:
        """Update the unit's slices, those of parameters that some rank used.

        ``scale``: how many times too large the gradients are, as of a loss that was scaled.
        Memory: gradients of another dtype than the slice's are converted a batch at a time, so that the
            copies take no more than the unit's largest slice.
        """
        for batch in self._batches([each for each in self._of_unit[unit] if each.span in used]):
            for each in batch:
                gradient = each.unit.grads.reduced[each.part].to(each.tensor.dtype)
                each.tensor.grad = gradient if scale == 1 else gradient / scale
            self.optimizer.step()
            for each in batch:
                each.tensor.grad = None

    def _batches(self, waiting: list[Slice]) -> Iterator[list[Slice]]:
        """The slices of one unit: all at once if gradients can be lent as they are, else in small batches."""
        converted = [each for each in waiting if each.unit.grads.dtype != each.tensor.dtype]
        if not converted:
            yield from [waiting] if waiting else []
            return
        bound, batch, numel = max(each.tensor.numel() for each in converted), [], 0
        for each in waiting:
            if batch and numel + each.tensor.numel() > bound:
                yield batch
                batch, numel = [], 0
            batch.append(each)
            numel += each.tensor.numel()
        yield batch

    def state_tensors(self) -> list[torch.Tensor]:
        """Every tensor in the optimizer's state."""
        state = self.optimizer.state.values()
        return [t for each in state for t in each.values() if isinstance(t, torch.Tensor)]

    def excess_bytes(self) -> float:
        """State beyond an even share of it, over the slices that have any."""
        return sum(each.excess_bytes for each in self.slices if each.tensor in self.optimizer.state)


def options_of(group: dict) -> dict:
    """A parameter group without its parameters: lr, weight decay and the rest."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
