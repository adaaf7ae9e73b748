"""Parameter groups in several copies: the user's own, and one in each stock optimizer.

A scheduler writes to the user's group, and a stock optimizer may write to its own: a step counter, a learning
rate that it decays itself. Copying all options in one direction would undo what the other side wrote, so only
changes are copied.
"""

import copy
from typing import Any

import numpy as np
import torch


def options_of(group: dict) -> dict:
    """Return a parameter group without its parameters: lr, weight decay and the rest."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def fill_in_changed(group: dict, defaults: dict, original: dict) -> None:
    """Give a new group the ``defaults`` that the user has changed, unless it names a class of its own."""
    if "optimizer" in group:
        return
    for key, value in defaults.items():
        if key not in original or original[key] is not value:
            group.setdefault(key, value)


class SharedGroup:
    """One parameter group in all its copies.

    Several groups may hold the same tensor, for example a default, and an optimizer may count in it. So an
    in-place change is repeated in place. All groups of an optimizer have one ``memo`` (as in copy.deepcopy),
    so that they get one copy of a new tensor.

    Args:
        copies: the group in each stock optimizer.
        source: the copy that the user is shown. All copies get the same updates.
    """

    def __init__(self, copies: list[dict], source: dict):
        self._copies, self.source = copies, source
        self._shown: dict[str, tuple] = {}
        self._used: dict[str, tuple] = {}

    @torch.no_grad()
    def fill_in(self, group: dict, defaults: dict, memo: dict) -> None:
        """Add the options that the user left out. A tensor that the user gave, such as an lr, stays."""
        given = {
            key: value
            for key, value in (defaults | group).items()
            if isinstance(value, torch.Tensor) and isinstance(self.source.get(key), torch.Tensor)
        }
        for each in self._copies:
            for key, value in given.items():
                each[key].copy_(value)  # it may have changed since the optimizer was built
        self.take_back(group, memo)
        group.update(given)
        self._shown = _values(group)

    def changed(self, group: dict) -> list[str]:
        """Return which options the user changed in ``group`` since the last call of `hand_over`."""
        return _changed(_values(group), self._shown)

    def hand_over(self, group: dict, changed: list[str], memos: list[dict]) -> None:
        """Copy what the user ``changed`` in ``group`` to the stock optimizers."""
        if changed:
            now = _values(group)
            for each, memo in zip(self._copies, memos, strict=True):
                _repeat(changed, now, self._shown, each, memo)
            self._used, self._shown = _values(self.source), now

    def take_back(self, group: dict, memo: dict) -> None:
        """Copy what the stock optimizers changed since the last call to the user's ``group``."""
        now = _values(self.source)
        if changed := _changed(now, self._used):
            _repeat(changed, now, self._used, group, memo)
            for each in self._copies:  # the source of another group may be in any of the optimizers
                memo |= {id(each[k]): group[k] for k in changed if isinstance(each.get(k), torch.Tensor)}
            self._shown = _values(group)
        self._used = now


def _values(group: dict) -> dict[str, tuple]:
    return {key: (value, _mark(value)) for key, value in options_of(group).items()}


def _mark(value: Any) -> Any:
    """Something that differs after an in-place change. It reads no tensor on a GPU: the CPU would wait.

    There it takes the version counter, which a write through ``.data`` does not increase.
    """
    if isinstance(value, torch.Tensor):
        return id(value), value.tolist() if value.device.type == "cpu" else value._version
    if isinstance(value, (list, tuple)):
        return [_mark(each) for each in value]
    if isinstance(value, dict):
        return {key: _mark(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value if isinstance(value, (bool, int, float, str)) else id(value)


def _changed(now: dict[str, tuple], before: dict[str, tuple]) -> list[str]:
    """Return the keys that are new, are gone, or have another value."""
    return [key for key in before | now if not (_same(key, now, before) and now[key][1] == before[key][1])]


def _same(key: str, now: dict[str, tuple], before: dict[str, tuple]) -> bool:
    """Return whether it is the same object, which may have changed in place."""
    return key in now and key in before and now[key][0] is before[key][0]


@torch.no_grad()
def _repeat(changed: list[str], now: dict, before: dict, group: dict, memo: dict) -> None:
    """Make the same changes to another copy of a group, with copies of the values."""
    for key in changed:
        if key not in now:
            group.pop(key, None)
        elif isinstance(value := now[key][0], torch.Tensor) and _same(key, now, before):
            group[key].copy_(value)
        else:
            group[key] = copy.deepcopy(value, memo)
