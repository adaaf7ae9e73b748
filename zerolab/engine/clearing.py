"""ClearedGradients: what a user has cleared on this rank after it was reduced.

Every rank must clear the same, because a rank that clears alone removes its share of all ranks' gradients.
"""

_ALL = "all"


class ClearedGradients:
    """What was cleared since the ranks last compared it, and after how many reductions.

    Attributes:
        last: the names of the parameters that were cleared one by one, all after the last reduction.
    """

    def __init__(self) -> None:
        self.last: list[str] = []
        self._earlier: list[str] = []
        self._reductions = 0

    def note(self, name: str) -> None:
        """One parameter's gradient was cleared."""
        self.last.append(name)

    def note_all(self) -> None:
        """All gradients were cleared."""
        self._close()
        self._earlier.append(self._in_words(_ALL))

    def note_reduction(self) -> None:
        """A unit's gradients are being reduced."""
        self._close()
        self._reductions += 1

    def earlier(self) -> list[str]:
        """Return what was cleared before ``last``, in words."""
        return list(self._earlier)

    def everything(self) -> list[str]:
        """Return all that was cleared, in words."""
        return self._earlier + [self._in_words(name) for name in self.last]

    def _close(self) -> None:
        self._earlier, self.last = self.everything(), []

    def _in_words(self, what: str) -> str:
        return f"{what}, after {self._reductions} reductions"
