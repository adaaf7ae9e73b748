"""WatchedParameter: a parameter whose ``data`` has a version counter that the engine can read.

PyTorch increases a tensor's version counter at every write in place. ``parameter.data`` is another tensor in
the same memory. That tensor has its own counter, which is deleted with the tensor, so writes to it cannot be
detected. Here all tensors that ``parameter.data`` returns share one counter, which is kept.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

_DATA: Any = torch.Tensor.data
"""The attribute as PyTorch defines it."""


class DataAliases:
    """What ``data`` returned of one unit's parameters: an alias of each, whose counter the others share.

    It watches parameters of the class nn.Parameter. Those of another class keep it, and are not watched.
    """

    def __init__(self, parameters: tuple[nn.Parameter, ...]):
        self._by_storage: dict[tuple[int, int], torch.Tensor] = {}
        for parameter in parameters:
            if type(parameter) is nn.Parameter:
                parameter.__class__ = WatchedParameter
                _ALIASES[parameter] = self

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the alias of a parameter, a new one where there is none of its present storage."""
        key = (id(parameter), parameter.untyped_storage()._cdata)
        if key not in self._by_storage:
            self._by_storage.setdefault(key, _DATA.__get__(parameter))  # another thread may come first
        return self._by_storage[key]

    def versions(self) -> dict[tuple[int, int], int]:
        """The counters, by the ids of the parameter and its storage. One that is missing is at zero."""
        return {key: alias._version for key, alias in self._by_storage.items()}

    def count_of(self, storage: torch.UntypedStorage) -> int:
        """How many of them are kept in this storage."""
        return sum(1 for _, place in self._by_storage if place == storage._cdata)

    def forget(self) -> None:
        """Let the aliases go: the parameters get another storage."""
        self._by_storage.clear()


_ALIASES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The aliases of each watched parameter's unit. The parameter's own attributes would be pickled with it."""


class WatchedParameter(nn.Parameter):
    """A parameter of a model in training. Its copies, and what is loaded from a file, are of nn.Parameter."""

    @property
    def data(self) -> torch.Tensor:
        aliases = _ALIASES.get(self)
        return _DATA.__get__(self) if aliases is None else aliases.of(self).detach()

    @data.setter
    def data(self, tensor: torch.Tensor) -> None:
        _DATA.__set__(self, tensor)

    def __repr__(self) -> str:  # type: ignore[override]  # mypy loses the name of torch's keyword
        return repr(nn.Parameter(self.detach(), self.requires_grad))

    def __deepcopy__(self, memo):
        copied = super().__deepcopy__(memo)
        copied.__class__ = nn.Parameter
        return copied
