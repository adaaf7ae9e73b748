"""Parameter groups of which there are several copies: the user's own, and one in each stock optimizer.

A scheduler writes to the user's, and a stock optimizer may write to its own: a step counter, a learning rate
that it decays itself. Copying everything in either direction would undo what the other side wrote, so only
changes are copied.
"""

import copy
from typing import Any

import torch

_REMOVED = object()


def options_of(group: dict) -> dict:
    """A parameter group without its parameters: lr, weight decay and the rest."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


class SharedGroup:
    """One parameter group in all its copies.

    Args:
        copies: the group in each stock optimizer.
        source: the one of them whose values the user is shown; all get the same updates.
    """

    def __init__(self, copies: list[dict], source: dict):
        self._copies, self.source = copies, source
        self._shown: dict[str, tuple] = {}
        self._used: dict[str, tuple] = {}

    def fill_in(self, group: dict, defaults: dict) -> None:
        """Show the options that the user left out. A tensor of the user's, such as an lr, stays."""
        given = {key: value for key, value in (defaults | group).items() if isinstance(value, torch.Tensor)}
        self.take_back(group)
        group.update(given)
        self._shown = {key: value for key, value in _values(group).items() if key not in given}

    def hand_over(self, group: dict) -> None:
        """Give the stock optimizers what the user changed in ``group`` since the last call."""
        changes, self._shown = _changes(group, self._shown)
        if changes:
            for each in self._copies:
                _write(each, changes)
            self._used = _values(self.source)

    def take_back(self, group: dict) -> None:
        """Show in the user's ``group`` what the stock optimizers changed since the last call."""
        changes, self._used = _changes(self.source, self._used)
        if changes:
            _write(group, changes)
            self._shown = _values(group)


def _changes(group: dict, before: dict[str, tuple]) -> tuple[dict[str, Any], dict[str, tuple]]:
    """What is new or another value than ``before``, or gone; and the values now."""
    now = _values(group)
    changed = {key: value for key, (value, mark) in now.items() if not _same(before.get(key), value, mark)}
    return changed | {key: _REMOVED for key in before if key not in now}, now


def _values(group: dict) -> dict[str, tuple]:
    return {key: (value, _mark(value)) for key, value in options_of(group).items()}


def _same(before: tuple | None, value: Any, mark: Any) -> bool:
    return before is not None and before[0] is value and before[1] == mark


def _mark(value: Any) -> Any:
    """What differs after a value was changed in place. A tensor is not read: the CPU would wait for a GPU."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, (list, tuple)):
        return [_mark(each) for each in value]
    if isinstance(value, dict):
        return {key: _mark(each) for key, each in value.items()}
    return value if isinstance(value, (bool, int, float, str)) else id(value)


def _write(group: dict, changes: dict[str, Any]) -> None:
    """Copies of the values: a tensor that an optimizer counts in must not be that of all of them."""
    for key, value in changes.items():
        if value is _REMOVED:
            group.pop(key, None)
        else:
            group[key] = copy.deepcopy(value)
