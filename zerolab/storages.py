"""How much memory tensors take: their storages, not their shapes."""

from collections.abc import Iterable

import torch


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """The bytes of the distinct storages behind the tensors; views of one storage count once."""
    sizes = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())
