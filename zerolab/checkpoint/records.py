"""Records: named slices of flattened tensors, and objects, in a checkpoint's files.

What a checkpoint holds must not depend on how many ranks wrote it. So every tensor is stored flat, under its
name, as the slices that the ranks happened to own. A reader asks for whatever slices it needs, and gets each
put together from the stored ones that overlap it: no rank ever holds the whole.

The files are in torch.distributed.checkpoint's format: a record is what torch.save writes of one tensor or
object, and `torch_metadata` says where it is. zerolab reads its own list of records instead, in the manifest.
"""

import io
import os
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zerolab.optimizer import Shard

MOST_NUMEL = 2**24
"""Longer slices are stored as several. A rank holds one record at a time, so this bounds its memory, and not
the size of the model: 64 MiB in fp32.
"""


class Record(NamedTuple):
    """Elements ``start`` to ``stop`` of the tensor ``key``, which has ``numel``; or an object: no dtype.

    It is in ``length`` bytes of ``file``, from ``offset`` on.
    """

    key: str
    dtype: torch.dtype | None
    numel: int
    start: int
    stop: int
    file: str
    offset: int
    length: int


def key_of(shard: Shard) -> str:
    """The name under which a shard's tensor is stored."""
    return f"model.{shard.name}" if shard.key is None else f"optimizer.{shard.name}.{shard.key}"


def write(path: Path, shards: Iterable[Shard], objects: dict[str, Any]) -> list[Record]:
    """Write shards and objects one after the other into a new file, and to the disk itself.

    Memory: a copy of one record's values.
    """
    records = []
    with open(path, "xb") as file:
        for shard in (part for whole in shards for part in _cut(whole)):
            part = (shard.values.dtype, shard.numel, shard.start, shard.stop)
            records.append(Record(key_of(shard), *part, path.name, *_put(_alone(shard.values), file)))
        for key, value in objects.items():
            records.append(Record(key, None, 0, 0, 0, path.name, *_put(value, file)))
        file.flush()
        os.fsync(file.fileno())
    return records


def _alone(values: torch.Tensor) -> torch.Tensor:
    """The same values on the CPU in a storage of their own: torch.save writes the whole of a storage."""
    values = values.detach().cpu()
    return values if values.untyped_storage().nbytes() == values.nbytes else values.clone()


def _put(value: Any, file: io.BufferedWriter) -> tuple[int, int]:
    """Append one tensor or object; its offset and length."""
    offset = file.tell()
    torch.save(value, file)
    return offset, file.tell() - offset


def _cut(shard: Shard) -> Iterator[Shard]:
    """The same as shards of at most `MOST_NUMEL` elements; none if it is empty."""
    for start in range(shard.start, shard.stop, MOST_NUMEL):
        yield shard.within(start, start + MOST_NUMEL)


def fill(folder: Path, records: list[Record], shards: Iterable[Shard]) -> None:
    """Overwrite every shard with what is stored of it, converted to its dtype. Memory: two records."""
    of_key: dict[str, list[Record]] = {}
    for record in records:
        of_key.setdefault(record.key, []).append(record)
    for shard in shards:
        for record in of_key.get(key_of(shard), ()):
            part = shard.within(record.start, record.stop)
            if part.values.numel():
                stored = read(folder, record)
                part.values.copy_(stored[part.start - record.start : part.stop - record.start])


def read(folder: Path, record: Record, weights_only: bool = True) -> Any:
    """What one record holds, on the CPU."""
    with open(folder / record.file, "rb") as file:
        file.seek(record.offset)
        content = io.BytesIO(file.read(record.length))
    return torch.load(content, map_location="cpu", weights_only=weights_only)


def require_files(folder: Path, records: list[Record]) -> None:
    """Check that a checkpoint that was copied is all here. Raises: OSError."""
    sizes: dict[str, int] = {}
    for record in records:
        sizes[record.file] = max(sizes.get(record.file, 0), record.offset + record.length)
    for name, size in sizes.items():
        found = (folder / name).stat().st_size
        if found < size:
            raise OSError(f"{name} has {found} bytes of {size}: copy it again, or load another generation")


def torch_metadata(records: list[Record]) -> bytes:
    """The ``.metadata`` by which torch.distributed.checkpoint's own tools find the records.

    `_StorageInfo` is no public name of torch's; it is used here alone. Tried on torch 2.13.0.
    """
    # Not above: only a save needs it, on one rank, and it takes a second.
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    described, places = {}, {}
    for each in records:
        if each.dtype is None:
            index, described[each.key] = MetadataIndex(each.key), BytesStorageMetadata()
        else:
            index, chunk = MetadataIndex(each.key, [each.start]), torch.Size([each.stop - each.start])
            whole = TensorStorageMetadata(TensorProperties(each.dtype), torch.Size([each.numel]), [])
            described.setdefault(each.key, whole).chunks.append(ChunkStorageMetadata(index.offset, chunk))
        places[index] = _StorageInfo(each.file, each.offset, each.length)
    return pickle.dumps(Metadata(described, storage_data=places))
