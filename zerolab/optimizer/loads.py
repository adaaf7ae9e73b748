"""Loads: the calls of load_state_dict, for the ranks to compare."""


class Loads:
    """The calls of load_state_dict since the ranks last agreed.

    All ranks have to call it equally often: a rank may load a part of a state that no other rank has. After
    ranks that differ were refused, a new call begins anew: when all ranks load again, they are alike.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._compared = self._compared_before_lines = 0

    def note(self, state: str) -> None:
        """A state was loaded. Args: state: what ranks compare of it, in words."""
        if self._compared != self._compared_before_lines:
            self._lines, self._compared_before_lines = [], self._compared
        when = f", loaded after {self._compared} comparisons of the ranks" if self._compared else ""
        self._lines.append(state + when)

    def compare(self) -> list[str]:
        """Return a line for each call, for every rank to compare them now."""
        self._compared += 1
        return self._lines
