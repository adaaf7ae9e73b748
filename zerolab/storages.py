"""Measure how much memory tensors take, from their storages, not their shapes; hash and copy storages."""

import hashlib
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager

import torch


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the bytes of the distinct storages behind the tensors; views of one storage count once."""
    sizes = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor, whose storage is a part. By name: to import the class takes a second."""
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)


@contextmanager
def allocated(tensor: torch.Tensor) -> Iterator[None]:
    """Inside the with block the tensor's storage has its size, with unknown contents, if it is freed.

    PyTorch makes no slice of a tensor whose storage is freed. On CPUs this takes addresses and no memory.
    """
    storage = tensor.untyped_storage()
    freed = not storage.nbytes() and tensor.numel() > 0
    if freed:
        storage.resize_(tensor.nbytes)
    try:
        yield
    finally:
        if freed:
            storage.resize_(0)


def copy_together(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, which may have another dtype.

    On a GPU this is one kernel for many pairs, if the first tensors have one dtype and so have the second.
    """
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(targets, sources)


COLUMNS = 16
"""How many columns of eight bytes `checksum` adds up. On CPUs 8 columns take seven times as long."""

HASHED_WORDS = 2**10
"""Buffers of up to so many words of eight bytes are hashed as they are: that is faster than the sums."""


def checksum(flat: torch.Tensor) -> bytes:
    """Eight bytes that differ where two flat buffers differ, unless all column sums of large ones are equal.

    The buffer's size is a multiple of 64 bytes. It is read once, in memory order; a large one is not copied.
    On a GPU this waits for the device. Without contents, on the meta device, the checksum is zero.
    """
    if flat.is_meta:
        return bytes(8)
    words = flat.view(torch.int64)
    rows = len(words) // COLUMNS if len(words) > HASHED_WORDS else 0
    columns = words[: rows * COLUMNS].view(rows, COLUMNS).sum(dim=0)
    copied = torch.cat([columns, words[rows * COLUMNS :]])  # numpy() makes a storage that cannot be freed
    return hashlib.blake2b(copied.cpu().numpy().tobytes(), digest_size=8).digest()


class MemoryMeter:
    """The bytes that the buffers of a run hold, and the most that they held at once.

    Who owns buffers reports them after each allocation and each release, and while an old buffer and its
    successor are there together. So no peak is missed.

    Attributes:
        phase: what the run is doing now, as in the trace. `enter` changes it.
        held_bytes: what all owners together hold now.
        peak_bytes: the most they held since `reset_peak`.
        peak_by_phase: the same for each phase.
    """

    def __init__(self):
        self.phase = "setup"
        self.held_bytes = self.peak_bytes = 0
        self._peak_of_phase = -1
        self.peak_by_phase: dict[str, int] = {}
        self._by_owner: dict[Hashable, int] = {}

    def report(self, owner: Hashable, *tensors: torch.Tensor | None) -> None:
        """Replace what ``owner`` held by the storages of ``tensors``; none of them means it holds nothing."""
        self.hold(owner, storage_bytes(tensors))

    def hold(self, owner: Hashable, held_bytes: int) -> None:
        """The same for one who counts itself."""
        self.held_bytes += held_bytes - self._by_owner.get(owner, 0)
        if held_bytes:
            self._by_owner[owner] = held_bytes
        else:
            self._by_owner.pop(owner, None)
        if self.held_bytes > self._peak_of_phase:
            self.note_peak()

    def enter(self, phase: str) -> None:
        """The run begins to do something else, with what is held now."""
        self.phase = phase
        self._peak_of_phase = self.peak_by_phase.get(phase, -1)
        self.note_peak()

    def note_peak(self, passing_bytes: int = 0) -> None:
        """Keep the peak, of what is held and of what is there beside it for a moment."""
        bytes_now = self.held_bytes + passing_bytes
        if bytes_now > self._peak_of_phase:
            self._peak_of_phase = self.peak_by_phase[self.phase] = bytes_now
            self.peak_bytes = max(self.peak_bytes, bytes_now)

    def reset_peak(self) -> None:
        """Forget the peaks, as after the construction of an optimizer."""
        self.peak_bytes, self._peak_of_phase = 0, -1
        self.peak_by_phase.clear()
        self.note_peak()


def digest(tensor: torch.Tensor) -> bytes:
    """Sixteen bytes that differ where the values of two tensors of one shape and dtype do.

    Memory: a copy of the tensor, because a storage that NumPy has seen cannot be freed. On a GPU this waits
    for the device.
    """
    copied = tensor.detach().reshape(-1).to("cpu", copy=True)
    return hashlib.blake2b(copied.view(torch.uint8).numpy().data, digest_size=16).digest()
