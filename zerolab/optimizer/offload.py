"""Offload: masters and optimizer state leave the device, and come back while they are updated.

Their tensors stay, with shape and dtype, and their storages are freed. So the stock optimizers keep their
tensors, and an update works as without offloading. What leaves together is a `Parcel`: the master of one
unit, or the state of the units that are updated together.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_map

from zerolab.storages import MemoryMeter
from zerolab.tier import Tier
from zerolab.unit import FlatUnit


class Parcel:
    """Tensors that leave the device together, and come back together.

    Args:
        tensors: says which they are now. Only storages that can be freed may be among theirs.
        report: tells the meter of memory what is on the device now.
    """

    def __init__(self, tier: Tier, tensors: Callable[[], Iterable[Tensor]], report: Callable[[], None]):
        self._tier, self._tensors, self._report = tier, tensors, report
        self._places: dict[int, list[Any]] = {}
        self._away: list[tuple[UntypedStorage, int, Any]] = []
        self._uses = 0

    @property
    def away_bytes(self) -> int:
        """How many bytes are outside the device now."""
        return sum(nbytes for _, nbytes, _ in self._away)

    def leave(self) -> None:
        """Write the storages to the tier, and free them when all are written. Raises: OSError."""
        if self._away:
            return
        self._report()  # an update may have made new tensors
        storages = {s._cdata: s for t in self._tensors() if (s := t.untyped_storage()).nbytes()}
        leaving = list(self._placed(storages.values()))
        for storage, _, place in leaving:
            self._tier.write(place, storage)
        for storage, _, _ in leaving:
            storage.resize_(0)
        self._away = leaving
        self._report()

    def _placed(self, storages: Iterable[UntypedStorage]) -> Iterator[tuple[UntypedStorage, int, Any]]:
        """Each storage with its size and a place of that size, those of the last time first."""
        taken: Counter[int] = Counter()
        for storage in storages:
            nbytes = storage.nbytes()
            places = self._places.setdefault(nbytes, [])
            if taken[nbytes] == len(places):
                places.append(self._tier.place(nbytes))
            yield storage, nbytes, places[taken[nbytes]]
            taken[nbytes] += 1

    def come_back(self) -> None:
        """Allocate the storages again, and read them. Raises: OSError, with all of them still away."""
        try:
            for storage, nbytes, place in self._away:
                storage.resize_(nbytes)
                self._tier.read(place, storage)
        except BaseException:
            for storage, _, _ in self._away:
                storage.resize_(0)
            raise
        self._away = []
        self._report()

    @contextmanager
    def here(self) -> Iterator[None]:
        """On the device inside the with block."""
        self.come_back()
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            if not self._uses:
                self.leave()


class Offload:
    """What of a ZeroOptimizer lies outside the device, and how it comes back.

    Args: tier: where it lies. Without one nothing leaves, and nothing has to come back.
    """

    def __init__(self, tier: Tier | None, meter: MemoryMeter):
        self.tier, self._meter = tier, meter
        self._masters: dict[FlatUnit, Parcel] = {}
        self._states: dict[FlatUnit, Parcel] = {}

    def take_master(self, unit: FlatUnit) -> None:
        """Have the fp32 master of a unit leave, if it has one beside its parameters."""
        if self.tier is not None and unit.trainable and unit.has_own_master:
            self._masters[unit] = Parcel(self.tier, lambda: [unit.master], unit.report)
            self._masters[unit].leave()

    def take_states(self, units: list[FlatUnit], tensors: Callable[[], list[Tensor]]) -> None:
        """Have the state of units that are updated together leave: ``tensors``, as many as there are then."""
        if self.tier is not None:
            owner = ("optimizer state", units[0])
            parcel = Parcel(self.tier, tensors, lambda: self._meter.report(owner, *tensors()))
            self._states[units[0]] = parcel
            parcel.leave()

    def masters(self, units: list[FlatUnit]) -> AbstractContextManager[None]:
        """The masters of these units on the device inside the with block. Memory: theirs."""
        return _here(_of(units, self._masters))

    def states(self, units: list[FlatUnit]) -> AbstractContextManager[None]:
        """The same for the optimizer's state of units that are updated together."""
        return _here(_of(units, self._states))

    def resident(self, units: list[FlatUnit]) -> AbstractContextManager[None]:
        """Masters and state of units that are updated together on the device inside the with block."""
        if self.tier is None:
            return nullcontext()
        return _here([*_of(units, self._masters), *_of(units, self._states)])

    def reserve(self, nbytes: int) -> None:
        """Make room for more state, as of a new parameter group. Raises: OSError where a disk has none."""
        if self.tier is not None:
            self.tier.reserve(nbytes)

    def lasting(self, values: dict) -> dict:
        """Return one parameter's state in tensors that nobody frees: copies, where state is offloaded."""
        if self.tier is None:
            return values
        return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, values)

    def has_master_of(self, unit: FlatUnit) -> bool:
        return unit in self._masters

    @property
    def away_bytes(self) -> int:
        """How many bytes are outside the device now."""
        return sum(parcel.away_bytes for parcel in [*self._masters.values(), *self._states.values()])


def _of(units: Iterable[FlatUnit], parcels: dict[FlatUnit, Parcel]) -> list[Parcel]:
    return [parcels[unit] for unit in units if unit in parcels]


@contextmanager
def _here(parcels: list[Parcel]) -> Iterator[None]:
    with ExitStack() as stack:
        for parcel in parcels:
            stack.enter_context(parcel.here())
        yield
