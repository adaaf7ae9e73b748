"""Updates: which stock optimizer updates which parameters, and whether it may be given slices of them."""

from dataclasses import dataclass, field

import torch
from torch import nn

from zerolab.optimizer.axes import Axes
from zerolab.optimizer.groups import options_of
from zerolab.optimizer.probe import Kind, state_bytes_of, verdict_of
from zerolab.optimizer.settings import with_fused


@dataclass(eq=False)
class Update:
    """A stock optimizer, and the parameter groups that it updates.

    Attributes:
        optimizer_class: its class.
        defaults: the keywords it is built with, for options that a group does not have.
        kind: whether it may be given slices of parameters, or needs them whole.
        places: which of the user's groups it updates.
    """

    optimizer_class: type[torch.optim.Optimizer]
    defaults: dict
    kind: Kind
    places: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.optimizer_class.__name__

    @property
    def needs_whole(self) -> bool:
        """Whether it updates a parameter as a whole, so that one rank has to own all of it."""
        return self.kind is Kind.BY_PARAMETER


class Updates:
    """The stock optimizers of a ZeroOptimizer, by group and by parameter.

    A group may have a class of its own, as ``{"params": [...], "optimizer": torch.optim.Muon, "lr": 0.02}``.
    Its other options are keywords of that class, and ``defaults`` are for ``optimizer_class`` alone.

    Args: groups: this takes ``optimizer`` out of them.
    Attributes: of_groups: the update of each group.
    Raises: TypeError and ValueError for a class that cannot be sharded, and for keywords that it has not.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: dict,
        groups: list[dict],
        device: torch.device,
    ):
        self._class, self._defaults = optimizer_class, defaults
        self._updates: dict[tuple, Update] = {}
        self._of_parameter: dict[int, Update] = {}
        self._state_bytes: dict[int, float] = {}
        self._laid_out = False
        self.of_groups: list[Update] = []
        for group in groups:
            self.add(group)
        for update in self._updates.values():
            own = [groups[place] for place in update.places]
            update.defaults = with_fused(update.optimizer_class, update.defaults, own, device)

    def add(self, group: dict) -> None:
        """Find the update of one more group.

        Raises: as above, and ValueError for a parameter that was laid out for another update.
        """
        optimizer_class = group.pop("optimizer", self._class)
        defaults = self._defaults if optimizer_class is self._class else {}
        options, parameters = options_of(group), group["params"]
        verdict = verdict_of(optimizer_class, defaults, options)
        if verdict.refusal:
            raise ValueError(verdict.refusal)
        shapes = {tuple(p.shape) for p in parameters}
        nbytes = {shape: state_bytes_of(optimizer_class, defaults, options, shape) for shape in shapes}
        key = optimizer_class, verdict.kind
        update = self._updates.get(key) or Update(optimizer_class, defaults, verdict.kind)
        if self._laid_out and (others := {self.of(p) for p in parameters} - {update}):
            raise ValueError(
                f"these parameters are laid out for {others.pop().name}, and the group's optimizer is "
                f"{update.name}: list them with their optimizer when the ZeroOptimizer is built, with lr=0 "
                "if they are to start later"
            )
        self._updates[key] = update
        update.places.append(len(self.of_groups))
        self.of_groups.append(update)
        self._of_parameter |= {id(p): update for p in parameters}
        self._state_bytes |= {id(p): nbytes[tuple(p.shape)] / max(1, p.numel()) for p in parameters}

    def of(self, parameter: nn.Parameter) -> Update:
        """Return a parameter's update; the first group's for one that is in no group."""
        return self._of_parameter.get(id(parameter), self.of_groups[0])

    def state_bytes(self, parameter: nn.Parameter) -> float:
        """Bytes of optimizer state for each element of a parameter; none where it is in no group."""
        return self._state_bytes.get(id(parameter), 0.0)

    def begin_layout(self, model: nn.Module, axes: Axes) -> None:
        """From here on each parameter keeps its update.

        Raises: ValueError where an update needs a parameter whole of which tensor-parallel ranks have parts.
        """
        for name, parameter in model.named_parameters():
            if parameter in axes.splits and self.of(parameter).needs_whole:
                raise ValueError(
                    f"{self.of(parameter).name} updates whole parameters, and each tensor-parallel rank has "
                    f"a part of {name}: pass an elementwise optimizer for it, such as AdamW, or train "
                    "without tensor parallelism"
                )
        self._laid_out = True

    def describe(self) -> list[str]:
        """Return the class of each group's optimizer, to be compared with those of other ranks."""
        classes = [update.optimizer_class for update in self.of_groups]
        return [f"group {i} by {c.__module__}.{c.__qualname__}" for i, c in enumerate(classes)]
