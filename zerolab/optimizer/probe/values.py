"""Values that optimizers keep in their state and groups: compare them, and find the tensors in them."""

from collections.abc import Iterator
from typing import Any

import torch

PLAIN = (bool, int, float, complex, str, type(None))


def equal(first: Any, second: Any) -> bool:
    """Whether two values are the same, NaN too; objects that are no numbers need only be of one type."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return (first.shape, first.dtype) == (second.shape, second.dtype) and bool(
            ((first == second) | first.isnan() & second.isnan()).all()
        )
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, PLAIN) and isinstance(second, PLAIN):
        return first == second or (first != first and second != second)
    return type(first) is type(second)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value, in lists, tuples and dicts too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)


def named_tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a value that have dimensions, with a name for each: that of the value, and its place."""
    if isinstance(value, torch.Tensor):
        if value.dim():
            yield name, value
    elif isinstance(value, (list, tuple, dict)):
        for place, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from named_tensors(f"{name}.{place}", each)


def storable_whole(value: Any) -> bool:
    """Whether a checkpoint can store it with a whole parameter: tensors, numbers, lists and dicts.

    Tensors have to lie in memory without gaps. The order of a sum, and its last bits, depend on strides.
    """
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided and not has_gaps(value)
    if isinstance(value, dict):
        return all(isinstance(key, PLAIN) for key in value) and all(map(storable_whole, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(storable_whole, value))
    return isinstance(value, PLAIN)


def without_contents(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device with this one's shape and dtype, and its strides if it has no gaps."""
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def has_gaps(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements, in some order, do not fill its memory one after the other."""
    return without_contents(tensor).stride() != tensor.stride()


def storable_in_slices(value: Any, tensor: torch.Tensor) -> bool:
    """Whether a checkpoint can store it with a slice: one number, or a tensor of the slice's shape."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 or value.shape == tensor.shape
    if isinstance(value, (list, tuple)):
        return all(storable_in_slices(each, tensor) and not isinstance(each, torch.Tensor) for each in value)
    return isinstance(value, PLAIN)


def described(value: Any) -> str:
    """Return what a value is, for an error."""
    if isinstance(value, torch.Tensor):
        gaps = " with gaps in memory" * (value.layout == torch.strided and has_gaps(value))
        return f"a tensor of shape {tuple(value.shape)}{gaps}"
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__}"
    return f"an object of class {type(value).__name__}"
