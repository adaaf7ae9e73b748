"""Aliases: detect tensors of users in the memory of a unit's flat buffer.

``parameter.detach()``, ``parameter.data`` and a state dict give tensors in the parameter's own memory. While
a parameter is a placeholder, such a tensor can still be read, and nothing tells the engine.
"""

import torch

from zerolab.unit.watched_parameter import DataAliases


class Aliases:
    """How many tensors have the memory of one flat buffer, compared with how many the engine itself has.

    Args: data: what ``parameter.data`` returned, which the engine keeps.
    """

    def __init__(self, data: DataAliases):
        self._data, self._own = data, 0

    def note_own(self, flat: torch.Tensor) -> None:
        """All tensors that have this memory now are the engine's."""
        self._own = self.count(flat)

    def note_more(self, count: int) -> None:
        """The engine has taken so many more."""
        self._own += count

    def of_users(self, flat: torch.Tensor) -> bool:
        """Return whether there are others."""
        return self.count(flat) > self._own

    def count(self, flat: torch.Tensor) -> int:
        """Return how many tensors have this memory, beside those that ``parameter.data`` is made from."""
        storage = flat.untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata) - self._data.count_of(storage)
