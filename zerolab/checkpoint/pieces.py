"""Pieces: named slices of flattened tensors, on their way to and from torch.distributed.checkpoint.

What a checkpoint keeps must not depend on how many ranks wrote it. So every tensor is stored flat, under its
name, as the slices that the ranks happened to hold. A reader asks for whatever slices it needs, and gets each
put together from the stored ones that overlap it: nobody ever holds the whole.

A planner says which slices there are, a storage writer puts them on disk; both are torch's own points of
extension, and its ordinary tools read the files. Beyond its documented interface this module, and no other,
uses `_StorageInfo` and the ``prefix`` of a plan. Tried on torch 2.13.0.
"""

import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

MOST_NUMEL = 2**24
"""Longer slices are stored as several. Reading and writing hold two stored ones in memory at the most, so
this, and not the size of the model, is the bound: 64 MiB each in fp32.
"""


@dataclass(frozen=True, eq=False)
class Piece:
    """Elements ``start`` to ``stop`` of the flattened tensor ``key``, which has ``numel`` in all.

    Shapes: values [stop - start]: what to write, or where to read to.
    """

    key: str
    numel: int
    start: int
    values: torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.key, (self.start,))

    def within(self, start: int, stop: int) -> "Piece":
        """What of it lies between ``start`` and ``stop`` of the tensor. May be empty."""
        low = min(max(self.start, start), self.stop)
        high = max(min(self.stop, stop), low)
        return Piece(self.key, self.numel, low, self.values[low - self.start : high - self.start])

    def cut(self, most_numel: int) -> Iterator["Piece"]:
        """The same as pieces of at most ``most_numel``; none if it is empty."""
        for start in range(self.start, self.stop, most_numel):
            yield self.within(start, start + most_numel)


def write(folder: Path, pieces: Iterable[Piece], objects: dict, group: dist.ProcessGroup) -> None:
    """Write every rank's pieces and objects into ``folder``, and to the disk itself.

    Collective. Memory: a copy of one piece of `MOST_NUMEL`. Raises: OSError on every rank if one failed.
    """
    planner = _WritePlanner(pieces, objects)
    with _failing_alike(f"{folder} could not be written", group):
        dcp.save({}, storage_writer=_Writer(folder), planner=planner, process_group=group)


def read(folder: Path, pieces: Iterable[Piece], keys: Iterable[str], group: dist.ProcessGroup) -> dict:
    """Fill every rank's pieces from ``folder``; the objects stored under ``keys``.

    Values are converted to the dtype of the piece they are read into. Collective.
    Memory: two stored pieces. Raises: OSError on every rank if one failed; if files are missing or too
    short, before anything is filled.
    """
    planner = _ReadPlanner(folder, pieces, keys)
    with _failing_alike(f"{folder} could not be read", group):
        dcp.load({}, storage_reader=dcp.FileSystemReader(folder), planner=planner, process_group=group)
    return planner.objects


class _WritePlanner(DefaultSavePlanner):
    """Plans one write for each piece and object of this rank; torch checks that all ranks' make a whole."""

    def __init__(self, pieces: Iterable[Piece], objects: dict):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.source, self.objects = pieces, objects

    def create_local_plan(self) -> SavePlan:
        self.pieces = {part.index: part for piece in self.source for part in piece.cut(MOST_NUMEL)}
        objects = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self.objects]
        return SavePlan([_write_item(piece) for piece in self.pieces.values()] + objects)

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        if item.type != WriteItemType.BYTE_IO:
            return self.pieces[item.index].values.detach()
        buffer = io.BytesIO()
        torch.save(self.objects[item.index.fqn], buffer)
        return buffer


def _write_item(piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size([piece.start]), torch.Size([piece.stop - piece.start]))
    properties = TensorProperties.create_from_tensor(piece.values)
    data = TensorWriteData(chunk, properties, torch.Size([piece.numel]))
    return WriteItem(piece.index, WriteItemType.SHARD, tensor_data=data)


class _Writer(dcp.FileSystemWriter):
    """Writes a rank's items one after another into one file, in the layout that FileSystemReader reads.

    torch's own write_data keeps the copies it makes until the file is closed: this rank's part of the
    checkpoint in memory a second time.
    """

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not self.path.is_dir():
            raise FileNotFoundError(
                f"rank 0 made {self.path} and here it is not: save to a file system that all ranks share"
            )
        return plan

    def write_data(self, plan: SavePlan, planner: _WritePlanner) -> Future[list[WriteResult]]:
        results, name = [], f"{plan.storage_data.prefix}0.distcp"
        with open(self.path / name, "xb") as file:
            for item in plan.items:
                start = file.tell()
                _put(planner.resolve_data(item), file)
                length = file.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _put(data: torch.Tensor | io.BytesIO, file: io.BufferedWriter) -> None:
    """Append one item. A slice is copied out first, because torch.save writes the whole of a storage."""
    if isinstance(data, io.BytesIO):
        file.write(data.getbuffer())
    else:
        data = data.cpu()
        torch.save(data if data.untyped_storage().nbytes() == data.nbytes else data.clone(), file)


class _ReadPlanner(DefaultLoadPlanner):
    """Plans one read for each stored piece that overlaps one of this rank's."""

    def __init__(self, folder: Path, pieces: Iterable[Piece], keys: Iterable[str]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.folder, self.pieces = folder, {piece.index: piece for piece in pieces if piece.values.numel()}
        self.objects = dict.fromkeys(keys)

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False) -> None:
        self.metadata = metadata
        if is_coordinator:
            _check_files(self.folder, metadata.storage_data.values())

    def create_local_plan(self) -> LoadPlan:
        items = [item for piece in self.pieces.values() for item in self._sources(piece)]
        nowhere = torch.Size([0])
        for index in map(MetadataIndex, self.objects):
            items.append(ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere))
        return LoadPlan(items)

    def _sources(self, piece: Piece) -> Iterator[ReadItem]:
        """The reads that fill one piece. Raises: ValueError where the stored pieces leave a gap."""
        stored, found = self.metadata.state_dict_metadata.get(piece.key), 0
        for chunk in stored.chunks if stored else ():
            (start,), (numel,) = chunk.offsets, chunk.sizes
            low, high = max(piece.start, start), min(piece.stop, start + numel)
            if low < high:
                found += high - low
                yield ReadItem(
                    LoadItemType.TENSOR,
                    piece.index,
                    torch.Size([low - piece.start]),
                    MetadataIndex(piece.key, (start,)),
                    torch.Size([low - start]),
                    torch.Size([high - low]),
                )
        if found != piece.values.numel():
            raise ValueError(
                f"of {piece.key}[{piece.start}:{piece.stop}] it holds {found} elements, not all "
                f"{piece.values.numel()}: load another generation"
            )

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        self.objects[item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=False)

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        (start,), (numel,) = item.dest_offsets, item.lengths
        return self.pieces[item.dest_index].values.detach()[start : start + numel]


def _check_files(folder: Path, places: Iterable[_StorageInfo]) -> None:
    """See that a checkpoint that was copied has arrived. Raises: OSError."""
    sizes: dict[str, int] = {}
    for place in places:
        sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
    for name, size in sizes.items():
        found = (folder / name).stat().st_size
        if found < size:
            raise OSError(f"{name} has {found} bytes of {size}: copy it again, or load another generation")


@contextmanager
def _failing_alike(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """torch tells all ranks of any rank's failure, by an exception that no ``except Exception`` would see.

    Raises: OSError, from the lowest rank's own error, with that rank as ``raised_on``; an interrupt as it is.
    """
    try:
        yield
    except CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items())
        if not isinstance(error, Exception):
            raise error from None
        told = OSError(f"{what}: rank {rank} failed with {type(error).__name__}: {error}")
        told.raised_on = dist.get_global_rank(group, rank)
        raise told from error
