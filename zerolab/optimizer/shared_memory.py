"""Refuse models in which a parameter shares memory with something that would not follow it.

The optimizer gives parameters a flat buffer as their memory. Whatever else has their old memory keeps it.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


def refuse_shared_memory(model: nn.Module) -> None:
    """Raises: ValueError where a parameter shares memory with another, a buffer or a module's attribute."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if _has_memory(parameter)]
    _refuse_among_parameters(named)
    by_storage: dict[int, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, parameter in named:
        by_storage[parameter.untyped_storage()._cdata].append((name, parameter))
    for where, tensor in _other_tensors(model):
        for name, parameter in by_storage.get(tensor.untyped_storage()._cdata, ()):
            if _overlap(tensor, parameter):
                raise ValueError(
                    f"{where} shares memory with parameter {name}, which gets new memory from the optimizer: "
                    f"{where} would keep the old values. Compute it in forward from the parameter, or make "
                    "it a clone"
                )


def _refuse_among_parameters(named: list[tuple[str, nn.Parameter]]) -> None:
    """Each of two would get its own memory, and they would no longer be tied."""
    places = sorted((p.device.type, p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in named)
    for (device, _, stop, name), (next_device, start, _, next_name) in itertools.pairwise(places):
        if device == next_device and start < stop:
            raise ValueError(
                f"parameters {name} and {next_name} share memory, as after {next_name}.data = {name}.data: "
                "tie them by using one Parameter in both places"
            )


def _other_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers, and tensors in the attributes of modules, in lists and dicts too, that have memory."""
    ours = set(model.parameters())
    for path, module in model.named_modules():
        remade = _remade(module)
        for name, value in [*module._buffers.items(), *vars(module).items()]:
            for leaf in tree_leaves(value) if name not in remade else ():
                if isinstance(leaf, torch.Tensor) and leaf not in ours and _has_memory(leaf):
                    yield f"{path}.{name}".lstrip("."), leaf


def _remade(module: nn.Module) -> set[str | None]:
    """The attributes that are made again in each forward.

    torch.nn.utils.spectral_norm makes a weight, in a hook that has its name, and an nn.RNNBase its list of
    weights when they have changed.
    """
    names = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
    return names | {"_flat_weights"} if isinstance(module, nn.RNNBase) else names


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors in one storage have elements between the first and the last of each other."""
    (start, stop), (its_start, its_stop) = _extent(one), _extent(other)
    return start < its_stop and its_start < stop


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and the one after its last byte."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.itemsize
