"""Record the allocations and releases of a step, from its tensors' storages."""

import weakref
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alloc(NamedTuple):
    """A request for a block of memory. Blocks are numbered in the order of these."""

    block: int
    size_bytes: int
    long_lived: bool = False


class Free(NamedTuple):
    """The release of a block."""

    block: int


def record(step: Callable[[], Any], meta: bool = False) -> list[Alloc | Free]:
    """Run ``step`` and return the allocations and releases of its tensors' storages, in their order.

    With ``meta`` those of tensors on the meta device are recorded, and no others. They have sizes and no
    memory, so a step of any size can be recorded.

    A block is long-lived if it lives when the step ends. If ``step`` is a generator function, so are those
    that live at one of its ``yield``: one between forward and backward makes what forward keeps long-lived.

    A storage is seen where an operation of torch returns it. So these are not in the sequence: memory that an
    operation takes and frees itself, tensors that were there before, states of random number generators, and
    what ``untyped_storage().resize_()`` changes, as stage 3 does.
    """
    recorder = _Recorder(meta)
    with recorder:
        running = step()
        if isinstance(running, Generator):
            for _ in running:
                recorder.mark_long_lived()
        recorder.mark_long_lived()
    recorder.live.clear()  # what is freed from here on is not part of the step
    return recorder.sequence


class _Recorder(TorchDispatchMode):
    """Looks after each operation for storages that were not there before it."""

    def __init__(self, meta: bool) -> None:
        super().__init__()
        self._meta = meta
        self.sequence: list[Alloc | Free] = []
        self.live: dict[int, tuple[int, weakref.ref]] = {}  # by the storage's address: its block
        self._allocs: list[int] = []  # of each block, where it is in the sequence

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made_of_numbers = function is torch.ops.aten.lift_fresh.default  # torch.tensor(...) passes its result
        given = () if made_of_numbers else (args, kwargs)
        before = {storage._cdata: storage.nbytes() for storage in self._storages(given)}
        result = function(*args, **(kwargs or {}))
        for storage in self._storages((args, kwargs, result)):
            known_bytes = before.get(storage._cdata, 0)
            if storage.nbytes() != known_bytes:  # a new one, or one that the operation has resized
                self._free(storage._cdata)
                self._alloc(storage)
                before[storage._cdata] = storage.nbytes()
        return result

    def _alloc(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes():
            address, block = storage._cdata, len(self._allocs)
            self.live[address] = block, weakref.ref(storage, lambda _: self._free(address))
            self._allocs.append(len(self.sequence))
            self.sequence.append(Alloc(block, storage.nbytes()))

    def _free(self, address: int) -> None:
        if address in self.live:
            block, _ = self.live.pop(address)
            self.sequence.append(Free(block))

    def mark_long_lived(self) -> None:
        """What lives now is long-lived."""
        for block, _ in self.live.values():
            place = self._allocs[block]
            alloc = self.sequence[place]
            assert isinstance(alloc, Alloc)
            self.sequence[place] = alloc._replace(long_lived=True)

    def _storages(self, tree: object) -> list[torch.UntypedStorage]:
        """The storages of all tensors in nested arguments or results that are to be recorded."""
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        return [tensor.untyped_storage() for tensor in tensors if tensor.is_meta == self._meta]
