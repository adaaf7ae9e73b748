"""Checkpoints: what a run needs to go on, stored so that it can go on anywhere.

    zerolab.save(optimizer, "runs/a", extra={"step": step})
    extra = zerolab.load(optimizer, "runs/a")

What is stored is named after parameters and knows nothing of ranks, stages or units: ``model.<name>`` is the
parameter as the optimizer updates it, in fp32 also where the model keeps 16 bits, ``optimizer.<name>.<key>``
its state. Each rank writes its 1/N of every unit, and reads whatever it owns at its stage, at its N. Padding
is never stored.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from zerolab.checkpoint import generations, manifest, records
from zerolab.checkpoint.records import Record
from zerolab.checkpoint.together import from_rank_0, gather, on_every_rank
from zerolab.optimizer import Shard, ZeroOptimizer


def save(optimizer: ZeroOptimizer, path: str | Path, extra: Any = None, keep: int = 2) -> None:
    """Store the parameters, the optimizer's state and ``extra`` as the newest generation in the folder
    ``path``.

    Collective, between two steps: gradients are not stored. ``extra`` is whatever else the run needs
    (scheduler, random states, position in the data, buffers): anything that pickles, each rank its own. The
    save is all or nothing: until it is complete and on disk, on all ranks, `load` finds the last one. After
    that the oldest generations are removed until ``keep`` are left.

    Memory: a copy of one piece, at most 64 MiB in fp32. Comm: the list of pieces, no values.
    Raises: OSError on every rank where any failed to write; the last checkpoint is as it was. ValueError for
        a ``keep`` below 1; RuntimeError inside full_params().
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep is {keep!r}: pass how many generations to keep, 1 or more")
    optimizer.require_idle("save")
    comm = optimizer.comm
    description = from_rank_0(comm, lambda: manifest.describe(optimizer))
    folder = from_rank_0(comm, lambda: generations.begin(Path(path).resolve()))
    try:
        _write(folder, optimizer, description, extra)
        from_rank_0(comm, lambda: generations.commit(folder, keep))
    except Exception:
        if comm.rank == 0:
            generations.discard(folder)
        raise


def _write(folder: Path, optimizer: ZeroOptimizer, description: dict, extra: Any) -> None:
    """Have every rank write its records, and rank 0 what is in them."""
    comm = optimizer.comm

    def write() -> list[Record]:
        if not folder.is_dir():
            raise FileNotFoundError(
                f"rank 0 made {folder} and here it is not: save to a file system that all ranks share"
            )
        path = folder / f"__{comm.rank}_0.distcp"  # as torch.distributed.checkpoint names them
        return records.write(path, optimizer.shards(disjoint=True), {_extra_key(comm.rank): extra})

    def finish() -> None:
        generations.put(folder / ".metadata", records.torch_metadata(found))
        manifest.write(folder, description | {"records": found})

    mine = on_every_rank(comm, f"{folder} could not be written", write)
    found = list(chain.from_iterable(gather(comm, mine)))
    from_rank_0(comm, finish)


def load(optimizer: ZeroOptimizer, path: str | Path) -> Any:
    """Take up a run where `save` left it, at any world size, stage, precision and layout of units; ``extra``.

    Collective. Parameters, optimizer state and hyperparameters become the stored ones and gradients are
    cleared. Each rank gets back its own ``extra`` if there are as many as saved it, else rank 0's; tensors in
    it are on the CPU. The files are pickles: load none that you would not run.

    Args: path: the folder given to `save`, or one generation in it.
    Memory: two stored pieces, at most 64 MiB each in fp32. Comm: Ψ at stages 1 and 2, none at others.
    Raises: FileNotFoundError without a checkpoint; ValueError where it is of another model or optimizer,
        naming the first difference, and OSError where files are missing, before anything is changed;
        RuntimeError inside full_params().
    """
    optimizer.require_idle("load")
    comm = optimizer.comm
    folder = from_rank_0(comm, lambda: generations.find(Path(path).resolve()))
    stored = from_rank_0(comm, lambda: manifest.read(folder))
    manifest.check(stored, optimizer)
    places, failed = stored["records"], f"{folder} could not be read"
    own_extra = _extra_key(comm.rank if stored["world_size"] == comm.world_size else 0)

    def read_extra() -> Any:
        records.require_files(folder, places)
        (place,) = (record for record in places if record.key == own_extra)
        return records.read(folder, place, weights_only=False)

    def fill(shards: Iterator[Shard]) -> None:
        on_every_rank(comm, failed, lambda: records.fill(folder, places, shards))

    extra = on_every_rank(comm, failed, read_extra)
    optimizer.replace(stored["state"], fill)
    _take_settings(optimizer, stored)
    return extra


def _extra_key(rank: int) -> str:
    return f"extra.{rank}"


def _take_settings(optimizer: ZeroOptimizer, stored: dict) -> None:
    """Take over the stored hyperparameters and loss scale."""
    own = optimizer.state_dict()
    pairs = zip(own["param_groups"], stored["groups"], strict=True)
    own["param_groups"] = [group | theirs["options"] for group, theirs in pairs]
    if stored["loss_scale"] is not None:
        own["loss_scale"] = stored["loss_scale"]
    optimizer.load_state_dict(own)
