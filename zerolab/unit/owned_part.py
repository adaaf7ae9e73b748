"""OwnedPart: what a rank owns of a unit, as the subject of a message to ranks that own the same."""

from collections.abc import Sequence

from zerolab.unit.unit import FlatUnit


class OwnedPart:
    """Identifies a message as the owned part of a unit's gradients; a Comm calls it a subject.

    Args: ranks: how many own the same part. Each is given an equal piece of it to reduce, or where that is
        not possible, pieces that differ by an element.
    """

    def __init__(self, unit: FlatUnit, ranks: int):
        self._unit, self._ranks = unit, ranks
        self.name, self.index, self.numel = f"the owned part of {unit.name}", unit.index, unit.owned_numel
        self._length = unit.owned.stop - unit.owned.start

    @property
    def cuts(self) -> Sequence[int] | None:
        """Where each rank's piece begins, and the last one ends; None where they are equal."""
        if self._length % self._ranks == 0:
            return None
        return [self._length * rank // self._ranks for rank in range(self._ranks + 1)]

    def bounds(self, rank: int) -> tuple[int, int]:
        """Where the piece of one of the ranks begins and ends."""
        first, last = (self._length * each // self._ranks for each in (rank, rank + 1))
        return first, last

    def describe(self, part: slice) -> tuple[str, ...]:
        """Return the parameter slices in that part of what is owned."""
        offset = self._unit.owned.start
        return self._unit.describe(slice(offset + part.start, offset + part.stop))
