"""Write a model's state dict as a file that torch.load reads, without the whole model in memory.

torch.save wants all tensors at once. But its file is a zip archive: a pickle in which each tensor only refers
to a record, and the records. So the pickle can be written from shapes alone, and the records one by one as
the parameters are gathered. The pickle of a tensor is made from torch's own pickle of an
empty one. The order of its parts is not documented, and only this module uses it. Tried on torch 2.13.0.

torch.save of fake tensors under torch.serialization.skip_data writes such a file too. But it leaves every
checksum 0, loses the tensors in a module's extra state, and is a prototype.
"""

import io
import os
import pickle
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import ZipFile, ZipInfo

import torch

from zerolab.checkpoint import buffers
from zerolab.checkpoint.checkpoint import require_zero_optimizer
from zerolab.checkpoint.together import from_rank_0
from zerolab.optimizer import ZeroOptimizer

ALIGNMENT_BYTES = 64
"""Where records begin, as torch.save has it, so that torch.load(mmap=True) gets tensors that are aligned."""


@torch.no_grad()
def export(optimizer: ZeroOptimizer, path: str | Path) -> None:
    """Write ``model.state_dict()`` into a file that ``torch.load(path)`` reads, with no zerolab around.

    Parameters have the precision they are optimized in: fp32 also where the model keeps 16 bits. Buffers are
    rank 0's. All or nothing: an old file stays until the new one is complete. Collective, between two steps.

    Memory: one unit whole, and on rank 0 a copy of one parameter. Comm: Ψ.
    Raises: OSError on every rank if rank 0 cannot write; ValueError for a buffer that is not dense;
        RuntimeError inside full_params(), after a step that failed during its update, and where a parameter
        or module was replaced or added.
    """
    require_zero_optimizer(optimizer)
    optimizer.require_idle("export")
    optimizer.require_one_state()
    archive = Archive(Path(path).resolve())

    def write(parameters: dict[str, torch.Tensor]) -> None:
        from_rank_0(optimizer.axes.everyone, lambda: archive.write(parameters))

    try:
        from_rank_0(optimizer.axes.everyone, lambda: archive.begin(optimizer))
        optimizer.gather_params(write)
        from_rank_0(optimizer.axes.everyone, archive.commit)
    finally:
        archive.discard()


class Archive:
    """The file under way, on rank 0. Until `commit` it has another name; `discard` removes what is left."""

    def __init__(self, path: Path):
        self.path, self.partial = path, path.with_name(f".{path.name}.{os.getpid()}")
        self.begun = False

    def begin(self, optimizer: ZeroOptimizer) -> None:
        """Open the file and write the pickle, and all the tensors that are not the optimizer's: buffers."""
        if self.path.is_dir():
            raise IsADirectoryError(f"{self.path} is a folder: export to a file in it")
        buffers.require_dense(optimizer.model)
        self.parameters = dict(optimizer.model.named_parameters())
        dtypes = {shard.name: shard.values.dtype for shard in optimizer.shard_forms() if shard.key is None}
        ours: dict[torch.Tensor, torch.dtype] = {
            parameter: dtypes[name] for name, parameter in self.parameters.items()
        }
        # The parameters themselves: state_dict would detach them, and freed parameters cannot be detached.
        state_dict = optimizer.model.state_dict(keep_vars=True)
        form_of = lambda t: (optimizer.axes.whole_shape(t), ours.get(t, t.dtype))
        pickled, self.records = _pickle_by_reference(state_dict, form_of)
        self.file = open(self.partial, "wb")  # noqa: SIM115 (closed by commit or discard)
        self.begun = True
        self.zip = ZipFile(self.file, "w", allowZip64=True)
        self._record("data.pkl", pickled)
        self._record("version", b"3\n")
        self._record("byteorder", sys.byteorder.encode())
        for tensor in [tensor for tensor in self.records if tensor not in ours]:
            self._write(tensor, tensor.detach())

    def write(self, values: dict[str, torch.Tensor]) -> None:
        """Write the values of the parameters of these names."""
        for name, value in values.items():
            self._write(self.parameters[name], value)

    def _write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Write what ``tensor`` holds, if the state dict has it."""
        if tensor in self.records:
            values = values.resolve_conj().resolve_neg()
            content = values.cpu().contiguous().view(-1).view(torch.uint8).numpy()
            self._record(f"data/{self.records[tensor]}", content.data)

    def _record(self, name: str, content: bytes | memoryview) -> None:
        entry = ZipInfo(f"archive/{name}")
        with_zip64 = 30 + len(entry.filename) + 20  # the header of an entry, and its sizes in 64 bits
        gap = -(self.file.tell() + with_zip64 + 4) % ALIGNMENT_BYTES
        entry.extra = struct.pack("<2sH", b"FB", gap) + b"\0" * gap
        with self.zip.open(entry, "w", force_zip64=True) as record:
            record.write(content)

    def commit(self) -> None:
        """Finish the file, see it on disk, and give it its name."""
        self.zip.close()
        self.file.flush()
        os.fsync(self.file.fileno())
        os.replace(self.partial, self.path)

    def discard(self) -> None:
        """Close the file, and remove it if it did not get its name."""
        if self.begun:
            with suppress(OSError, ValueError):  # on a full disk closing it fails as writing did
                self.zip.close()
            with suppress(OSError):
                self.file.close()
            self.partial.unlink(missing_ok=True)


def _pickle_by_reference(
    tree: object, form_of: Callable[[torch.Tensor], tuple[torch.Size, torch.dtype]]
) -> tuple[bytes, dict[torch.Tensor, int]]:
    """The pickle torch.save would make of ``tree``, and the number of the record each tensor refers to.

    Args: form_of: the shape and dtype that a tensor has in the file.
    One tensor under two names, as a tied weight is, is one record, and one tensor again when loaded.
    """
    records: dict[torch.Tensor, int] = {}

    class Pickler(pickle.Pickler):
        def reducer_override(self, found: object) -> Any:
            if not isinstance(found, torch.Tensor):
                return NotImplemented
            records[found] = len(records)
            return _rebuild(*form_of(found), records[found])

        def persistent_id(self, found: object) -> tuple | None:
            return tuple(found) if isinstance(found, _Record) else None

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump(tree)
    return buffer.getvalue(), records


class _Record(tuple):
    """Stands for a storage in the pickle, and is what torch.load finds it by."""


def _rebuild(shape: torch.Size, dtype: torch.dtype, number: int) -> tuple[Callable, tuple]:
    """Return how a loader rebuilds a tensor of that kind from a record: as torch says it of an empty one."""
    function, (storage, offset, _, _, *rest) = torch.empty(0, dtype=dtype).__reduce_ex__(2)
    if isinstance(storage, torch.storage.TypedStorage):
        kind, length = getattr(torch, storage._pickle_storage_type()), shape.numel()
    else:  # dtypes younger than typed storages: a length in bytes
        kind, length = torch.UntypedStorage, shape.numel() * dtype.itemsize
    stride = torch.empty(shape, device="meta").stride()
    record = _Record(("storage", kind, str(number), "cpu", length))
    return function, (record, offset, tuple(shape), stride, *rest)
