"""Write and read slices of flattened tensors, and objects, by name in a checkpoint's files.

What a checkpoint holds must not depend on how many ranks wrote it. So every tensor is stored flat, under its
name, as the slices that the ranks happened to own. A reader requests the slices it needs, and each is
assembled from the stored ones that overlap it. So no rank ever holds a whole tensor.

The files are in torch.distributed.checkpoint's format: a record is what torch.save writes of one tensor or
object, and `torch_metadata` says where it is. zerolab reads its own list of records instead, in the manifest.
"""

import io
import os
import pickle
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch.utils.serialization import config

from zerolab.optimizer import Shard
from zerolab.warn import warn_user

MOST_NUMEL = 2**24
"""Longer slices are stored as several. A rank holds one record at a time, so this bounds its memory, and not
the size of the model: 64 MiB in fp32.
"""


class Record(NamedTuple):
    """Elements ``start`` to ``stop`` of the tensor ``key``, which has ``numel``; or an object: no dtype.

    It is in ``length`` bytes of ``file``, from ``offset`` on, whose CRC-32 is ``checksum``.
    """

    key: str
    dtype: torch.dtype | None
    numel: int
    start: int
    stop: int
    file: str
    offset: int
    length: int
    checksum: int

    def __str__(self) -> str:
        return self.key if self.dtype is None else f"{self.key}[{self.start}:{self.stop}]"


def write(path: Path, shards: Iterable[tuple[str, Shard]], objects: dict[str, Any]) -> list[Record]:
    """Write shards under their keys, and objects, into a new file, and to the disk itself.

    Memory: a copy of one record's values, and of each object.
    """
    records = []
    with open(path, "xb") as file:
        for key, shard in ((key, part) for key, whole in shards for part in _cut(whole)):
            part = (shard.values.dtype, shard.numel, shard.start, shard.stop)
            records.append(Record(key, *part, path.name, *_put(_alone(shard.values), file)))
        for key, value in objects.items():
            content = pickled(key, value)
            place = (path.name, file.tell(), len(content), zlib.crc32(content))
            records.append(Record(key, None, 0, 0, 0, *place))
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return records


def _alone(values: torch.Tensor) -> torch.Tensor:
    """The same values on the CPU in a storage of their own: torch.save writes the whole of a storage."""
    values = values.detach().cpu()
    return values if values.untyped_storage().nbytes() == values.nbytes else values.clone()


class _Checksummed:
    """A file being written, and the CRC-32 of what is written to it by way of this."""

    def __init__(self, file: io.BufferedWriter):
        self.file, self.flush, self.checksum = file, file.flush, 0

    def write(self, content: bytes) -> int:
        self.checksum = zlib.crc32(content, self.checksum)
        return self.file.write(content)


def _put(values: torch.Tensor, file: io.BufferedWriter) -> tuple[int, int, int]:
    """Append one tensor; its offset, length and checksum."""
    offset, checksummed = file.tell(), _Checksummed(file)
    # Our checksum stands for torch's, and takes less time.
    with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]  # made at run time
        torch.save(values, cast(IO[bytes], checksummed))
    return offset, file.tell() - offset, checksummed.checksum


def _cut(shard: Shard) -> Iterator[Shard]:
    """The same as shards of at most `MOST_NUMEL` elements; none if it is empty."""
    for start in range(shard.start, shard.stop, MOST_NUMEL):
        yield shard.within(start, start + MOST_NUMEL)


def verify(folder: Path, records: Iterable[Record]) -> None:
    """Read what is stored, and compare its checksums. Memory: 1 MiB.

    Raises: OSError for the first record that is missing in part, or is not what was written.
    """
    for record in records:
        checksum, left = 0, record.length
        with open(folder / record.file, "rb") as file:
            file.seek(record.offset)
            while block := file.read(min(left, 2**20)):
                checksum, left = zlib.crc32(block, checksum), left - len(block)
        if left or checksum != record.checksum:
            problem = f"the file ends {left} bytes too early" if left else "its checksum is wrong"
            raise OSError(f"{record} in {record.file}: {problem}")


def fill(folder: Path, records: dict[str, list[Record]], shards: Iterable[tuple[str, Shard]]) -> None:
    """Overwrite every shard with what is stored under its key, in its dtype. Memory: two records."""
    for key, shard in shards:
        for record in records.get(key, ()):
            part = shard.within(record.start, record.stop)
            if part.values.numel():
                stored = read(folder, record)
                part.values.copy_(stored[part.start - record.start : part.stop - record.start])


def read(folder: Path, record: Record, trust: bool = False) -> Any:
    """What one record holds, on the CPU. Raises: UnpicklingError where that takes code and no ``trust``."""
    with open(folder / record.file, "rb") as file:
        file.seek(record.offset)
        return unpickle(str(record), file.read(record.length), trust)


def pickled(what: str, value: Any) -> bytes:
    """Return what torch.save writes of an object. Warns where `unpickle` will refuse it."""
    content = serialized(value)
    if names := _needs_code(content):
        warn_user(f"{what} holds {names}: only load(..., trust=True) will read it")
    return content


def serialized(value: Any) -> bytes:
    """Return what torch.save writes of an object."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpickle(what: str, content: bytes, trust: bool) -> Any:
    """What `pickled` has written, with tensors on the CPU: without ``trust`` only what needs no code to load.

    Raises: UnpicklingError, which names the classes that are in the way.
    """
    if not trust and (names := _needs_code(content)):
        raise pickle.UnpicklingError(
            f"{what} holds {names}, and a file with those can run any code: if you trust everybody who could "
            "write it, pass load(..., trust=True)"
        )
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=not trust)


def _needs_code(content: bytes) -> str:
    """The classes and functions in a pickle that torch.load refuses with weights_only; empty if none."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
    except pickle.UnpicklingError as error:
        names = [str(error)]
    return ", ".join(sorted(names))


def torch_metadata(records: list[Record]) -> bytes:
    """Return the ``.metadata`` by which torch.distributed.checkpoint's own tools find the records.

    `_StorageInfo` is no public name of torch's; it is used here alone. Tried on torch 2.13.0.
    """
    from torch.distributed.checkpoint import metadata  # not above: only a save needs it, on one rank
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    described: dict[str, Any] = {}
    places = {}
    for each in records:
        if each.dtype is None:
            index, described[each.key] = metadata.MetadataIndex(each.key), metadata.BytesStorageMetadata()
        else:
            index, numel = metadata.MetadataIndex(each.key, [each.start]), torch.Size([each.numel])
            properties = metadata.TensorProperties(each.dtype)
            whole = described.setdefault(each.key, metadata.TensorStorageMetadata(properties, numel, []))
            length = torch.Size([each.stop - each.start])
            whole.chunks.append(metadata.ChunkStorageMetadata(cast(torch.Size, index.offset), length))
        places[index] = _StorageInfo(each.file, each.offset, each.length)
    return pickle.dumps(metadata.Metadata(described, storage_data=places))
