"""Find tensors that are used while their message is under way: read on arrival, or written while sent.

isend and irecv return at once. Right values prove nothing then, because they depend on timing.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

# What takes of a tensor its shape and type alone.
_SHAPE_ONLY = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "empty")


class Region(NamedTuple):
    """The bytes from `first` to `last` of a storage."""

    storage: int
    first: int
    last: int

    def overlaps(self, other: "Region") -> bool:
        return self.storage == other.storage and self.first < other.last and other.first < self.last


class Started(NamedTuple):
    """A message under way: the number of its call, where its tensor is, and whether it is sent.

    `keeps` holds the storage's place in memory, but not its bytes: no other storage gets the same number.
    """

    number: int
    region: Region
    sent: bool
    keeps: StorageWeakRef


class Pending:
    """The messages that were started since the reader's code last waited. One wait may be for any of them."""

    def __init__(self) -> None:
        self._started: list[Started] = []

    def add(self, number: int, tensors: Sequence[torch.Tensor], sent: bool) -> None:
        for tensor in tensors:
            if region := _region(tensor):
                keeps = StorageWeakRef(tensor.untyped_storage())
                self._started.append(Started(number, region, sent, keeps))

    def clear(self) -> None:
        self._started.clear()

    def used_by(self, func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Iterator[int]:
        """Yield the numbers of the calls whose tensors an operation uses too early.

        Two receives into one tensor have a message of their own, in `zerolab.course.handles`.
        """
        if not self._started or func.is_view or func._opname.endswith(_SHAPE_ONLY):
            return
        receives = func.namespace == "c10d" and func._opname.startswith("recv")
        written = _written(func, args, kwargs)
        touched = [_region(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for each in self._started:
            regions = written if each.sent else [] if receives else touched
            if any(region and region.overlaps(each.region) for region in regions):
                yield each.number


def _written(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> list[Region | None]:
    """Where an operation writes. torch.distributed's own do not say, and write to their first argument."""
    if func.namespace == "c10d":
        return [] if func._opname == "send" else [_region(each) for each in tree_leaves(args[:1])]
    named = {argument.name for argument in func._schema.arguments if argument.is_write}
    by_place = [value for argument, value in zip(func._schema.arguments, args, strict=False)
                if argument.name in named]  # fmt: skip
    by_name = [value for name, value in kwargs.items() if name in named]
    return [_region(leaf) for leaf in tree_leaves([by_place, by_name])]


def _region(tensor: Any) -> Region | None:
    """Where a tensor's numbers are, if they are next to each other."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or not tensor.numel():
        return None
    if not tensor.is_contiguous() or tensor.is_meta:
        return None
    first = int(tensor.storage_offset()) * tensor.element_size()
    return Region(tensor.untyped_storage()._cdata, first, first + tensor.nbytes)
