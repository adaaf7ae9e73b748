"""Updates: which stock optimizer updates which parameters, and whether it may be given slices of them."""

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from zerolab.optimizer.axes import Axes
from zerolab.optimizer.groups import options_of
from zerolab.optimizer.probe import (
    Kind,
    complete_options,
    is_torchs,
    keywords_of_group,
    refusal_of_closure,
    state_bytes_of,
    verdict_of,
)
from zerolab.optimizer.settings import full_name, keywords_in_text, require_plain_options, with_fused


@dataclass(eq=False)
class Update:
    """A stock optimizer, and the parameter groups that it updates.

    Attributes:
        optimizer_class: its class.
        defaults: the keywords it is built with, for options that a group does not have.
        options: what its one group is built with; None where it has the options of the user's groups.
        kind: whether it may be given slices of parameters, or needs them whole.
        places: which of the user's groups it updates.
    """

    optimizer_class: type[torch.optim.Optimizer]
    defaults: dict
    options: dict | None
    kind: Kind
    places: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.optimizer_class.__name__

    @property
    def needs_whole(self) -> bool:
        """Whether it updates a parameter as a whole, so that one rank has to own all of it."""
        return self.kind is Kind.BY_PARAMETER


class Accepted(NamedTuple):
    """The options of a group that its class knows, and how they may be switched on and off."""

    known: Set[str]
    switches: set[frozenset]


class Updates:
    """The stock optimizers of a ZeroOptimizer, by group and by parameter.

    A group may have a class of its own, as ``{"params": [...], "optimizer": torch.optim.Muon, "lr": 0.02}``.
    Its other options are the keywords of that class, so it is updated as by ``Muon([...], lr=0.02)``. All
    other groups are updated as by one object of ``optimizer_class``, which has the ``defaults``.

    Args: groups: this takes ``optimizer`` and the keywords of its class out of them.
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
        shared = [group for group in groups if "optimizer" not in group]
        self._class, self._device = optimizer_class, device
        self._defaults = with_fused(optimizer_class, defaults, shared, device)
        self._shared: dict[Kind, Update] = {}
        self._of_parameter: dict[int, Update] = {}
        self._state_bytes: dict[int, float] = {}
        self._accepted: list[Accepted] = []
        self._laid_out = False
        self.of_groups: list[Update] = []
        for group in groups:
            self.add(group)

    def add(self, group: dict) -> None:
        """Find the update of one more group.

        Raises: as above, and ValueError for a parameter that was laid out for another update.
        """
        if "optimizer" not in group:
            self._add(group["params"], self._class, self._defaults, options_of(group), shared=True)
            return
        own_class = group.pop("optimizer")
        try:
            keywords, options = keywords_of_group(own_class, options_of(group))
            keywords = with_fused(own_class, keywords, [], self._device)
            self._add(group["params"], own_class, keywords, options, shared=False)
        except (TypeError, ValueError) as error:
            raise type(error)(f"parameter group {len(self.of_groups)}: {error}") from error
        for key in keywords.keys() & group.keys():
            del group[key]

    def _add(
        self,
        parameters: list[nn.Parameter],
        optimizer_class: type[torch.optim.Optimizer],
        keywords: dict,
        options: dict,
        shared: bool,
    ) -> None:
        require_plain_options(keywords | options)
        verdict = verdict_of(optimizer_class, keywords, options)
        if verdict.refusal:
            raise ValueError(verdict.refusal)
        if not (self._laid_out or is_torchs(optimizer_class)):
            _require_plain_parameters(parameters, optimizer_class.__name__)
        shapes = {tuple(p.shape) for p in parameters}
        nbytes = {shape: state_bytes_of(optimizer_class, keywords, options, shape) for shape in shapes}
        update = self._shared.get(verdict.kind) if shared else None
        update = update or Update(optimizer_class, keywords, None if shared else options, verdict.kind)
        if self._laid_out:
            self._require_layout(parameters, update)
        if shared:
            self._shared[verdict.kind] = update
        update.places.append(len(self.of_groups))
        self.of_groups.append(update)
        complete = complete_options(optimizer_class, keywords, options)
        self._accepted.append(Accepted(complete.keys(), {_switches(complete)}))
        self._of_parameter |= {id(p): update for p in parameters}
        self._state_bytes |= {id(p): nbytes[tuple(p.shape)] / max(1, p.numel()) for p in parameters}

    def remove_last(self) -> None:
        """Forget the last group, for which there is no room."""
        self.of_groups.pop().places.pop()
        self._accepted.pop()

    def _require_layout(self, parameters: list[nn.Parameter], update: Update) -> None:
        """Raises: ValueError where parameters are in a flat buffer of another update."""
        if others := {self.of(p) for p in parameters} - {update}:
            theirs = others.pop()
            raise ValueError(
                f"these parameters are laid out for {theirs.name} ({theirs.kind.short}), and the group's "
                f"optimizer is {update.name} ({update.kind.short}), with options of its own: put them "
                "into such a group when the ZeroOptimizer is built, with lr=0 if their training starts later"
            )

    def require_closure(self) -> None:
        """Raises: ValueError where a class does more with a closure than to call it once, first."""
        for update in dict.fromkeys(self.of_groups):
            if refusal := refusal_of_closure(update.optimizer_class, update.defaults, update.options):
                raise ValueError(refusal)

    def require_kind(self, place: int, options: dict) -> None:
        """See that a group's optimizer can go on with these options. It may not need more than it was given.

        Some classes are elementwise only with some options, such as no weight decay. The probe runs them
        again where an option was switched on or off, but not for each value of a learning rate.
        Raises: ValueError where parameters are cut that have to be whole now, or that cannot be sharded.
        """
        known, accepted = self._accepted[place]
        switches = _switches({key: value for key, value in options.items() if key in known})
        if switches in accepted:
            return
        update = self.of_groups[place]
        verdict = verdict_of(update.optimizer_class, update.defaults, options)
        if verdict.refusal or (verdict.kind is Kind.BY_PARAMETER and not update.needs_whole):
            why = verdict.refusal or (
                f"{update.name} then updates whole parameters, and these are cut between ranks: build the "
                "ZeroOptimizer with these options"
            )
            shown = ", ".join(f"{key}={value!r}" for key, value in options.items())
            raise ValueError(f"the options of parameter group {place} are {shown} now. {why}")
        accepted.add(switches)

    def require_options(self, place: int, options: dict) -> None:
        """See that options that were saved are those of a group's class, and that it can go on with them.

        Raises: ValueError where one is missing, and as `require_kind`.
        """
        if missing := ", ".join(sorted(self._accepted[place].known - options.keys())):
            name = self.of_groups[place].name
            raise ValueError(
                f"parameter group {place} of the state_dict has no {missing}, and {name} needs it: load what "
                f"{name} has saved, or build the optimizer with the class that was saved"
            )
        self.require_kind(place, options)

    @property
    def classes(self) -> list[tuple[str, list[str]]]:
        """Of each group, its class with its module, and the options that the class has."""
        known = (sorted(each.known) for each in self._accepted)
        return [(full_name(u.optimizer_class), each) for u, each in zip(self.of_groups, known, strict=True)]

    @property
    def names(self) -> str:
        """The class of the stock optimizers; that of each group where there are several."""
        names = [update.name for update in self.of_groups]
        return ", ".join(names if len(set(names)) > 1 else names[:1])

    def of(self, parameter: nn.Parameter) -> Update:
        """Return a parameter's update. One that is in no group may be added to one of the shared update."""
        if (update := self._of_parameter.get(id(parameter))) is not None:
            return update
        return next(iter(self._shared.values()), self.of_groups[0])

    def state_bytes(self, parameter: nn.Parameter) -> float:
        """Bytes of optimizer state for each element of a parameter; none where it is in no group."""
        return self._state_bytes.get(id(parameter), 0.0)

    def begin_layout(self, model: nn.Module, axes: Axes) -> None:
        """From here on each parameter keeps its update.

        Raises: ValueError where an update needs a parameter whole of which tensor-parallel ranks have parts.
        """
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter in axes.splits and self.of(parameter).needs_whole:
                raise ValueError(
                    f"{self.of(parameter).name} updates whole parameters, and each tensor-parallel rank has "
                    f"a part of {name}: pass an elementwise optimizer for it, such as AdamW, or train "
                    "without tensor parallelism"
                )
        self._laid_out = True

    def describe(self) -> list[str]:
        """Return what updates each group and how, to be compared with that of other ranks."""
        return [
            f"group {place} by {full_name(update.optimizer_class)}({keywords_in_text(update.defaults)}), "
            f"{update.kind.short}"
            for place, update in enumerate(self.of_groups)
        ]


def _require_plain_parameters(parameters: list[nn.Parameter], name: str) -> None:
    """Raises: ValueError for parameters of which the class may read what its slices have not."""
    for parameter in parameters:
        if type(parameter) is not nn.Parameter:
            raise ValueError(
                f"a parameter is a {type(parameter).__name__}, and {name} may treat this class in its own "
                "way, while a slice is an nn.Parameter: pass a class of torch.optim, or a plain parameter"
            )
        if tensors := [key for key, value in vars(parameter).items() if isinstance(value, torch.Tensor)]:
            raise ValueError(
                f"a parameter has the attribute {tensors[0]}, a tensor, and {name} may read it, while a "
                "slice has no part of it: pass a class of torch.optim, or keep the tensor in a module"
            )


def _switches(options: dict) -> frozenset:
    """The options that choose what an update does, without the sizes of numbers. It reads no tensor."""
    return frozenset((key, _switch(value)) for key, value in options.items())


def _switch(value: Any) -> Any:
    if isinstance(value, (bool, int, float)):
        return bool(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_switch, value))
    return value if isinstance(value, (str, type(None))) else type(value)
