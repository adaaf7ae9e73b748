"""Measure how many bytes of tensors a function holds at once, without its arguments."""

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Look after every operation at the storages that are alive; those of the tensors `given` do not count.

    It sees what an operation takes and returns, so scratch inside one operation is not counted.

    Attributes: nbytes, the most bytes at once; largest, the bytes of the largest storage.
    """

    def __init__(self, given: Iterable[torch.Tensor]):
        super().__init__()
        self.nbytes = self.largest = 0
        self._given = {tensor.untyped_storage()._cdata for tensor in given}
        self._alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                storage = leaf.untyped_storage()
                if storage._cdata not in self._given:
                    self._alive[StorageWeakRef(storage)] = storage.nbytes()
        self._alive = {ref: size for ref, size in self._alive.items() if not ref.expired()}
        self.nbytes = max(self.nbytes, sum(self._alive.values()))
        self.largest = max(self.largest, *self._alive.values(), 0)
        return result
