"""ClearedGradients: what a user has cleared on this rank after it was reduced.

Every rank must clear the same, because a rank that clears alone removes its share of all ranks' gradients.
"""

from collections.abc import Iterable

from zerolab.unit import FlatUnit
from zerolab.unit.sharded import as_plain_tensors

_ALL = "all"


class ClearedGradients:
    """What was cleared since the ranks last compared it.

    Attributes:
        last: the names of the parameters that were cleared one by one, all after the last reduction.
        earlier: what was cleared before them, and after how many reductions, in words.
    """

    def __init__(self) -> None:
        self.last: list[str] = []
        self.earlier: list[str] = []
        self._reductions = 0

    def note(self, name: str) -> None:
        """One parameter's gradient was cleared."""
        self.last.append(name)

    def note_all(self) -> None:
        """All gradients were cleared, so that nothing is left of an earlier difference between ranks."""
        self.last = []
        self.earlier = [self._in_words(_ALL)]

    def note_reduction(self) -> None:
        """A unit's gradients are being reduced."""
        self.earlier += map(self._in_words, self.last)
        self.last = []
        self._reductions += 1

    def everything(self) -> list[str]:
        """Return all that was cleared, in words."""
        return [*self.earlier, *map(self._in_words, self.last)]

    def _in_words(self, what: str) -> str:
        return f"{what}, after {self._reductions} reduction{'s' * (self._reductions != 1)}"


def clear_frozen(units: Iterable[FlatUnit], set_to_none: bool) -> None:
    """Clear what parameters that were frozen at construction have in ``grad``: the engine has none of it."""
    with as_plain_tensors():
        for parameter in (span.parameter for unit in units for span in unit.spans):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()
