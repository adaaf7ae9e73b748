"""Lesson 07's look at one block: the bytes that autograd keeps of it from forward to backward."""

import torch
from torch import Tensor, nn


def saved_bytes(block: nn.Module, x: Tensor) -> int:
    """Return the bytes of the storages that autograd keeps after ``block(x)``, without parameters.

    Each storage counts once, whole, although several operations may keep it or views of it.
    """
    parameters = {parameter.untyped_storage()._cdata for parameter in block.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = block(x)  # as long as this lives, no storage gets the identity of another
    del output
    return sum(kept.values())
