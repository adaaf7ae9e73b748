"""LocalUpdate: stock torch optimizers over the slices this rank owns, one for each batch of slices."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain

import torch

from zerolab.optimizer.batch import TOGETHER_NUMEL, Batch, batches, owned_numel, updated_together
from zerolab.optimizer.groups import SharedGroup, options_of
from zerolab.optimizer.members import require_members
from zerolab.optimizer.offload import Offload
from zerolab.optimizer.probe.values import tensors_in
from zerolab.optimizer.slice_states import SliceStates
from zerolab.optimizer.slices import Slice, cut
from zerolab.optimizer.updates import Update, Updates
from zerolab.unit import FlatUnit
from zerolab.unit.span import Span


class LocalUpdate:
    """Updates this rank's slice of every parameter with stock optimizers of the class given.

    Each batch of slices has an optimizer of its own, which is stepped exactly once in every training step.
    A single process steps its one optimizer as often, so a step counter or a schedule that the optimizer
    keeps itself stays correct, and a unit can still be updated and gathered before the next one. Small units
    are updated with the first of them. Each optimizer has as many groups as the user, some of them empty.
    This class does not know about ranks.

    Attributes:
        optimizers: the stock optimizers.
        slices: in the order of the groups, and in each in that of its parameters.
        members: of each group, the names of its parameters.
        state: the optimizers' state of each slice, by its tensor.
    """

    def __init__(
        self,
        updates: Updates,
        units: list[FlatUnit],
        groups: list[dict],
        offload: Offload,
    ):
        self._updates, self._units, self._offload = updates, units, offload
        self._cuts = [self._cut(group) for group in groups]
        self.members = [_names(slices) for slices in self._cuts]
        trainable = [unit for unit in units if unit.trainable]
        largest = max(owned_numel(unit, span) for unit in trainable for span in unit.spans)
        self._most_numel = max(largest, TOGETHER_NUMEL)
        self._together = {run[0]: run for run in updated_together(trainable, self._update_of)}
        self._batches = {first: self._build(run, groups) for first, run in self._together.items()}
        used = {batch.update for built in self._batches.values() for batch in built}
        for update in dict.fromkeys(updates.of_groups):
            if update not in used:
                self._add_empty(update, self._own_groups(update, groups))
        self.optimizers = [batch.optimizer for each in self._batches.values() for batch in each]
        self.state = SliceStates()
        for optimizer in self.optimizers:
            self.state.include(optimizer)
        self._shared = [self._share(place) for place in range(len(groups))]
        memo: dict = {}
        for place, (shared, group) in enumerate(zip(self._shared, groups, strict=True)):
            shared.fill_in(group, updates.of_groups[place].defaults, memo)

    def _update_of(self, unit: FlatUnit) -> Update:
        return self._updates.of(unit.spans[0].parameter)

    def _build(self, units: list[FlatUnit], groups: list[dict]) -> list[Batch]:
        """Build the stock optimizers of units that are updated together."""
        update = self._update_of(units[0])
        own = self._own_groups(update, groups)
        with self._offload.masters(units):
            built = [Batch(spans, update, own) for spans in batches(units, self._most_numel)]
        self._offload.take_states(units, partial(_own_state, units, built))
        return built

    def _add_empty(self, update: Update, groups: list[tuple[dict, list[Slice]]]) -> Batch:
        """Build an optimizer without slices, for the options of groups that have no trainable parameter."""
        batch = Batch([], update, groups)
        next(iter(self._batches.values())).append(batch)
        return batch

    def _own_groups(self, update: Update, groups: list[dict]) -> list[tuple[dict, list[Slice]]]:
        """The options and slices of the groups that one update has."""
        own = update.options
        return [(options_of(groups[p]) if own is None else own, self._cuts[p]) for p in update.places]

    @property
    def slices(self) -> list[Slice]:
        return list(chain.from_iterable(self._cuts))

    def in_groups(self, spans: Iterable[Span]) -> set[Span]:
        """Return those of the parameters that are in a group."""
        return {each.span for each in self.slices}.intersection(spans)

    @property
    def defaults(self) -> dict:
        """The options that all of its classes have, as the first has them: what schedulers ask for."""
        known = [optimizer.defaults for optimizer in self.optimizers]
        return {key: value for key, value in known[0].items() if all(key in each for each in known)}

    def _cut(self, group: dict) -> list[Slice]:
        """The slices of a group's parameters."""
        return cut(self._units, group["params"], self._updates.state_bytes)

    def _share(self, place: int) -> SharedGroup:
        """Return one group of all its optimizers. The user is shown a copy of it that has parameters."""
        own = self._updates.of_groups[place].places.index(place)
        copies = [optimizer.param_groups[own] for optimizer in self._optimizers_of(place)]
        return SharedGroup(copies, next((each for each in copies if each["params"]), copies[0]))

    def _optimizers_of(self, place: int) -> list[torch.optim.Optimizer]:
        """The stock optimizers that have a part of one group."""
        update = self._updates.of_groups[place]
        every = chain.from_iterable(self._batches.values())
        return [batch.optimizer for batch in every if batch.update is update]

    def add_group(self, group: dict) -> None:
        """Cut the parameters of a new group, and add each slice to its batch's optimizer.

        Raises: OSError, before anything is changed, where there is no room for offloaded state.
        """
        self._updates.add(group)
        update = self._updates.of_groups[-1]
        try:
            slices = self._cut(group)
            nbytes = sum(s.tensor.numel() * s.state_bytes_per_element for s in slices)
            self._offload.reserve(math.ceil(nbytes))
        except OSError:
            self._updates.remove_last()
            raise
        self._cuts.append(slices)
        self.members.append(_names(slices))
        own = [(units, each) for units, built in self._windows() for each in built if each.update is update]
        for units, batch in own:
            with self._offload.resident(units):
                batch.add_group(options_of(group), slices)
                self.state.include(batch.optimizer)
        if not own:  # it has no parameters, and a class of its own
            options = options_of(group) if update.options is None else update.options
            batch = self._add_empty(update, [(options, slices)])
            self.optimizers.append(batch.optimizer)
        self._shared.append(self._share(len(self._cuts) - 1))
        self._shared[-1].fill_in(group, update.defaults, {})

    def require_members(self, groups: list[dict]) -> None:
        """Raises: RuntimeError where the user's groups have other parameters than were cut for them."""
        require_members(groups, self._cuts)

    def hand_over(self, groups: list[dict]) -> None:
        """Copy what the user, or a scheduler, changed in the user's groups to the optimizers.

        The groups are those that `require_members` has seen.
        Raises: ValueError, before anything is copied, for options with which slices may not be updated.
        """
        changes = [shared.changed(group) for shared, group in zip(self._shared, groups, strict=True)]
        for place, (group, changed) in enumerate(zip(groups, changes, strict=True)):
            if changed:
                self._updates.require_kind(place, options_of(group))
        memos: dict[torch.optim.Optimizer, dict] = {optimizer: {} for optimizer in self.optimizers}
        for place, (shared, group) in enumerate(zip(self._shared, groups, strict=True)):
            shared.hand_over(group, changes[place], [memos[each] for each in self._optimizers_of(place)])

    def take_back(self, groups: list[dict]) -> None:
        """Copy what the optimizers changed in their groups to the user's."""
        memo: dict = {}
        for shared, group in zip(self._shared, groups, strict=True):
            shared.take_back(group, memo)

    def by_units(self, units: list[FlatUnit]) -> Iterator[tuple[list[FlatUnit], list[Slice]]]:
        """The units that are updated together, and each of the others of ``units``, with their slices."""
        slices: dict[FlatUnit, list[Slice]] = {}
        for each in self.slices:
            slices.setdefault(each.unit, []).append(each)
        for group in [*self._together.values(), *([unit] for unit in units if not unit.trainable)]:
            yield group, [each for unit in group for each in slices.get(unit, [])]

    def together(self, unit: FlatUnit) -> list[FlatUnit]:
        """Return the units that `step` updates when it is called with ``unit``, itself the first.

        An empty list where it is one of the small units that are updated with another.
        """
        return self._together.get(unit, [])

    def step(self, first: FlatUnit, used: set[Span], scale: float = 1.0) -> None:
        """Update the slices of parameters that some rank used, in ``first`` and the units together with it.

        ``scale``: how many times too large the gradients are, as of a loss that was scaled.
        Memory: gradients of another dtype than the slice's are converted a batch at a time, so that the
            copies have no more elements than this rank's largest slice, or `TOGETHER_NUMEL` if that is more.
        """
        for batch in self._batches[first]:
            batch.step(used, scale)

    def state_entries(self) -> int:
        """Return how many values are in the optimizers' state."""
        return sum(len(each) for optimizer in self.optimizers for each in optimizer.state.values())

    def state_tensors(self) -> list[torch.Tensor]:
        """Return every tensor in the optimizers' state."""
        return [tensor for each in self.state.values() for tensor in tensors_in(each)]

    def excess_bytes(self) -> float:
        """Return how much more state this rank has than an even share, over the slices that have state.

        Nothing, where the state is offloaded.
        """
        if self._offload.tier is not None:
            return 0.0
        return sum(each.excess_bytes for each in self.slices if each.tensor in self.state)

    def _windows(self) -> Iterator[tuple[list[FlatUnit], list[Batch]]]:
        """The units that are updated together, with their batches."""
        return zip(self._together.values(), self._batches.values(), strict=True)

    def state_dict(self) -> dict:
        """Return the state_dict of one optimizer for all slices, which are numbered in their order.

        It holds the state's own tensors, or copies of them where they are offloaded.
        """
        state: dict[int, dict] = {}
        numbers: dict[torch.Tensor, int] = {each.tensor: number for number, each in enumerate(self.slices)}
        for units, of_units in self._windows():
            with self._offload.states(units):
                for batch in of_units:
                    for tensor, values in batch.optimizer.state.items():
                        state[numbers[tensor]] = self._offload.lasting(values)
        return self.settings_dict() | {"state": state}

    def settings_dict(self) -> dict:
        """Return such a `state_dict` without state."""
        numbers = {each.tensor: number for number, each in enumerate(self.slices)}
        groups = [
            options_of(shared.source) | {"params": [numbers[each.tensor] for each in slices]}
            for shared, slices in zip(self._shared, self._cuts, strict=True)
        ]
        return self.optimizers[0].state_dict() | {"state": {}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict, groups: list[dict]) -> None:
        """Give each optimizer its part of such a `state_dict`, and copy its options to the user's groups.

        Raises: ValueError where the groups are not those that were saved.
        """
        numbers = {each.tensor: number for number, each in enumerate(self.slices)}
        state = state_dict["state"]

        def state_of(each: Slice) -> dict | None:
            values = state.get(numbers[each.tensor])
            return None if values is None else self._offload.lasting(values)

        self.replace_state(state_dict, groups, state_of)

    def replace_state(
        self, settings: dict, groups: list[dict], state_of: Callable[[Slice], dict | None]
    ) -> None:
        """Give each optimizer the options in ``settings``, and the state that ``state_of`` returns.

        Where state is offloaded, that of the units that are updated together is there at a time.
        Raises: ValueError, before anything is changed, where the groups are not those that were saved.
        """
        sizes = [len(group["params"]) for group in settings["param_groups"]]
        if sizes != [len(slices) for slices in self._cuts]:
            raise ValueError(
                f"the state_dict has groups of {sizes} parameters, and this optimizer of "
                f"{[len(slices) for slices in self._cuts]}: build it with the groups that were saved"
            )
        for place, group in enumerate(settings["param_groups"]):
            self._updates.require_options(place, options_of(group))
        numbers = {each.tensor: number for number, each in enumerate(self.slices)}
        for units, of_units in self._windows():
            with self._offload.states(units):
                for batch in of_units:
                    batch.load_state_dict(settings, numbers, state_of)
        self._shared = [self._share(place) for place in range(len(groups))]
        self.take_back(groups)


def _own_state(units: list[FlatUnit], of_units: list[Batch]) -> list[torch.Tensor]:
    """Return the tensors in the state of these batches that can be offloaded.

    Not scalars, and not what shares memory with parameters or gradients.
    """
    buffers = [t for u in units for t in (u.flat, u.shard, u.master, u.grads.local, u.grads.reduced)]
    used = {tensor.untyped_storage()._cdata for tensor in buffers if tensor is not None}
    state = chain.from_iterable(batch.optimizer.state.values() for batch in of_units)
    return [
        value
        for value in chain.from_iterable(map(tensors_in, state))
        if value.dim() > 0
        if (storage := value.untyped_storage())._cdata not in used and storage.resizable()
    ]


def _names(slices: list[Slice]) -> str:
    return ", ".join(each.span.name for each in slices)
