"""Tiers: memory outside a rank's device, for tensors that are needed only now and then.

A tier gives out places. The bytes of storages are written to a place and read from it, and every byte is
counted where it is moved. `DiskTier` is a file, `HostTier` the memory of the CPU, and `CountingTier` stands
for both in a rehearsal, whose tensors have no bytes.

The disk is read and written with explicit calls, in a file whose blocks are allocated first. So a full disk
is an OSError before training starts. A file that is mapped into memory would end the process with SIGBUS
instead, at the first write that finds no space.
"""

import ctypes
import os
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from zerolab.warn import warn_user

PLACES = (None, "cpu", "disk")
"""What ``offload`` may be."""

STAGED_BYTES = 2**24
"""How much of a GPU's tensor is on its way to or from a file at a time."""

_IN_MEMORY = {"tmpfs", "ramfs"}
"""File systems that keep files in memory."""


class Tier(ABC):
    """Memory outside the device.

    Attributes: read_bytes, written_bytes: what was moved from it and to it until now.
    """

    def __init__(self) -> None:
        self.read_bytes = self.written_bytes = 0

    @abstractmethod
    def place(self, nbytes: int) -> Any:
        """Return a new place for so many bytes. Raises: OSError where there is no room."""

    @abstractmethod
    def reserve(self, nbytes: int) -> None:
        """Make room for places of so many bytes together. Raises: OSError where there is none."""

    def give_back(self, place: Any, nbytes: int) -> None:  # noqa: B027 (there is nothing to do by default)
        """Let a place of so many bytes be given out again. Memory of the CPU is freed with its place."""

    def write(self, place: Any, storage: UntypedStorage) -> None:
        """Copy a storage to a place of its size. Raises: OSError where the disk fails."""
        self._write(place, _bytes_of(storage))
        self.written_bytes += storage.nbytes()

    def read(self, place: Any, storage: UntypedStorage) -> None:
        """Fill a storage with what was written to the place. Raises: OSError where the disk fails."""
        self._read(place, _bytes_of(storage))
        self.read_bytes += storage.nbytes()

    @abstractmethod
    def _write(self, place: Any, source: Tensor) -> None: ...

    @abstractmethod
    def _read(self, place: Any, target: Tensor) -> None: ...


class HostTier(Tier):
    """The memory of the CPU; pinned, which a GPU copies faster, where the tensors are on a GPU."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._pinned = device.type == "cuda"

    def reserve(self, nbytes: int) -> None:
        """Nothing: each place is allocated when it is asked for."""

    def place(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)

    def _write(self, place: Tensor, source: Tensor) -> None:
        place.copy_(source)

    def _read(self, place: Tensor, target: Tensor) -> None:
        target.copy_(place)


class CountingTier(Tier):
    """Counts what would be moved: a tensor on the meta device has no bytes."""

    def reserve(self, nbytes: int) -> None:
        """Nothing: there are no bytes."""

    def place(self, nbytes: int) -> None:
        return None

    def _write(self, place: None, source: Tensor) -> None: ...

    def _read(self, place: None, target: Tensor) -> None: ...


class DiskTier(Tier):
    """A file without a name in ``folder``: it is gone when the process ends, in whatever way.

    Args:
        folder: one that `require_writable` accepts.
        nbytes: how many bytes to reserve now. Places that need more are allocated when they are asked for.
    Raises: OSError where it is full.
    Warns: where the folder lies in memory.
    """

    def __init__(self, folder: Path, nbytes: int):
        super().__init__()
        self._folder = folder
        if lies_in_memory(folder):
            warn_user(
                f"offload_dir is {folder}, which lies in memory (tmpfs), so what is offloaded there saves no "
                "memory: pass a folder on a disk"
            )
        self._file = _unnamed_file(folder)
        weakref.finalize(self, self._file.close)
        self._used = self._allocated = 0
        self._given_back: dict[int, list[int]] = {}
        self._staging: Tensor | None = None
        self.reserve(nbytes or 1)  # an empty file fits on a full disk

    def reserve(self, nbytes: int) -> None:
        try:
            _allocate(self._file.fileno(), self._allocated, nbytes)
        except OSError as error:
            free_bytes = shutil.disk_usage(self._folder).free
            raise OSError(
                error.errno,
                f"offload_dir {self._folder} has no room for {nbytes:,} bytes more "
                f"({error.strerror}; {free_bytes:,} bytes are free): pass a folder on a larger disk, or use "
                "more ranks",
            ) from error
        self._allocated += nbytes

    def place(self, nbytes: int) -> int:
        if self._given_back.get(nbytes):
            return self._given_back[nbytes].pop()
        start = self._used
        if (missing := start + nbytes - self._allocated) > 0:
            self.reserve(missing)
        self._used += nbytes
        return start

    def give_back(self, place: int, nbytes: int) -> None:
        self._given_back.setdefault(nbytes, []).append(place)

    def _write(self, place: int, source: Tensor) -> None:
        for start, part in self._parts(source):
            left, offset = _memory_of(self._on_cpu(part).copy_(part)), place + start
            while left:
                done = os.pwrite(self._file.fileno(), left, offset)
                left, offset = left[done:], offset + done

    def _read(self, place: int, target: Tensor) -> None:
        for start, part in self._parts(target):
            staged = self._on_cpu(part)
            left, offset = _memory_of(staged), place + start
            while left:
                done = os.preadv(self._file.fileno(), [left], offset)
                if not done:
                    raise OSError(f"the file in offload_dir {self._folder} ends {len(left)} bytes too early")
                left, offset = left[done:], offset + done
            part.copy_(staged)

    def _parts(self, moved: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The parts that are moved one after the other, and where each begins."""
        most_bytes = max(1, len(moved)) if moved.device.type == "cpu" else STAGED_BYTES
        for start in range(0, len(moved), most_bytes):
            yield start, moved[start : start + most_bytes]

    def _on_cpu(self, part: Tensor) -> Tensor:
        """Return memory of the CPU through which a part goes: its own, or for a GPU's a buffer."""
        if part.device.type == "cpu":
            return part
        if self._staging is None:
            self._staging = torch.empty(STAGED_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._staging[: len(part)]


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _memory_of(tensor: Tensor) -> memoryview:
    """The memory itself. ``tensor.numpy()`` would give it too, but then the storage cannot be freed again."""
    return memoryview((ctypes.c_char * len(tensor)).from_address(tensor.data_ptr())).cast("B")


def require_writable(folder: Path) -> None:
    """Raises: ValueError where no file can be made in ``folder``."""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ValueError(f"offload_dir is {folder}, which {what}: pass a folder on a disk of this machine")
    try:
        _unnamed_file(folder).close()
    except OSError as error:
        raise ValueError(
            f"offload_dir is {folder}, and no file can be made there ({error.strerror}): pass a folder that "
            "this process may write to"
        ) from error


def _unnamed_file(folder: Path) -> Any:
    """Open a file that has no name: it never had one, or where that is not possible, as on NFS, it loses it
    at once.
    """
    return tempfile.TemporaryFile(dir=folder, buffering=0)


def _allocate(file: int, start: int, nbytes: int) -> None:
    """Have the file system allocate the blocks, so that writing there later cannot find it full."""
    if not nbytes:
        return
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, start, nbytes)
        return
    zeros = bytes(2**20)  # macOS has no such call
    for offset in range(start, start + nbytes, len(zeros)):
        os.pwrite(file, zeros[: start + nbytes - offset], offset)


def lies_in_memory(folder: Path) -> bool:
    """Return whether a folder is on a file system that keeps files in memory. Linux says so in /proc."""
    mounts = Path("/proc/self/mountinfo")
    if not mounts.exists():
        return False
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text(errors="replace").splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == number:
            return kind.split()[0] in _IN_MEMORY
    return False


def check_offload(offload: str | None, folder: Any, nbytes: int = 0) -> None:
    """Refuse settings that do not fit each other, and a folder that cannot be written to.

    Args: nbytes: how many bytes the user asks to reserve.
    Raises: ValueError, TypeError.
    """
    if isinstance(nbytes, bool) or not isinstance(nbytes, int):
        raise TypeError(f"offload_bytes is {nbytes!r}: pass a whole number of bytes")
    if nbytes < 0 or (nbytes and offload != "disk"):
        raise ValueError(
            f"offload_bytes is {nbytes:,} and offload {offload!r}: it must be 0 or more, and is for "
            'offload="disk" alone'
        )
    if offload not in PLACES:
        raise ValueError(f"offload is {offload!r}: choose from {', '.join(map(repr, PLACES))}")
    if offload != "disk":
        if folder is not None:
            raise ValueError(
                f'offload_dir is {folder!r} and offload {offload!r}: pass offload="disk" with it, or leave '
                "offload_dir out"
            )
        return
    if folder is None:
        raise ValueError('offload is "disk" and offload_dir None: pass a folder on a disk of this machine')
    if not isinstance(folder, (str, Path)):
        raise TypeError(f"offload_dir is {folder!r}: pass a folder's path, as text or as a pathlib.Path")
    require_writable(Path(folder))


def tier_of(
    offload: str | None, folder: str | Path | None, device: torch.device, nbytes: Callable[[], int]
) -> Tier | None:
    """Return the tier that settings ask for, after `check_offload`; None without one.

    Args: nbytes: says how many bytes will be offloaded, for which a disk needs room.
    Raises: OSError where there is none.
    """
    if offload is None:
        return None
    if device.type == "meta":
        return CountingTier()
    return HostTier(device) if offload == "cpu" else DiskTier(Path(folder or "").resolve(), nbytes())
