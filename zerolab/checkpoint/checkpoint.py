"""Checkpoints: what a run needs to go on, stored so that it can go on anywhere.

    zerolab.save(optimizer, "runs/a", extra={"step": step})
    extra = zerolab.load(optimizer, "runs/a")

What is stored is named after parameters and does not depend on ranks, stages or units: ``model.<name>`` is
the parameter as the optimizer updates it, in fp32 also where the model keeps 16 bits,
``optimizer.<name>.<key>`` its state. Each rank writes its 1/N of every unit, and reads whatever it owns at
its stage, at its N. Padding is never stored. Buffers are every rank's own, and so are the modules' extra
state and ``extra``.
"""

from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from zerolab.checkpoint import buffers, extra_state, generations, manifest, one_optimizer, records
from zerolab.checkpoint.folder_lock import FolderLock
from zerolab.checkpoint.manifest import key_of
from zerolab.checkpoint.records import Record
from zerolab.checkpoint.together import from_rank_0, gather, on_every_rank
from zerolab.collectives import Comm
from zerolab.optimizer import Shard, ZeroOptimizer
from zerolab.warn import warn_user


def save(optimizer: ZeroOptimizer, path: str | Path, extra: Any = None, keep: int = 2) -> None:
    """Store parameters, optimizer state, buffers, extra state and ``extra`` in ``path``, a new generation.

    Collective, between two steps: gradients are not stored. ``extra`` is whatever else the run needs
    (scheduler, random states, position in the data): anything that pickles, each rank its own. Where loading
    it takes more than torch.load's ``weights_only`` allows, a warning says so. The save is all or nothing:
    until it is complete and on disk, on all ranks, `load` finds the last one. After that the oldest
    generations are removed until ``keep`` are left.

    Memory: a copy of one record, at most 64 MiB in fp32. Comm: the list of records, no values.
    Raises: OSError on every rank where any failed to write, or where another run, or another optimizer of
        this one, saves into ``path``; the last checkpoint is as it was. ValueError for a ``keep`` below 1,
        for a buffer that is not dense or whose elements share memory, and where the optimizer's class or a
        module stores more in its state_dict than is saved; RuntimeError inside full_params(), in the middle
        of a step, after a step that failed during its update, and where a parameter or module was replaced
        or added after construction.
    """
    require_zero_optimizer(optimizer)
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep is {keep!r}: pass how many generations to keep, 1 or more")
    optimizer.require_idle("save")
    optimizer.require_known_state()
    optimizer.require_one_state()
    comm = optimizer.axes.everyone
    lock = FolderLock(Path(path).resolve())
    with optimizer.saving():
        description = _describe(optimizer)
        try:
            folder = from_rank_0(comm, lambda: _begin(lock, optimizer))
            _write_generation(folder, optimizer, description, extra, keep)
            one_optimizer.note_save(lock.path, optimizer)
        finally:
            lock.release()


def _begin(lock: FolderLock, optimizer: ZeroOptimizer) -> Path:
    """On rank 0: lock the folder of checkpoints and make the next generation's.

    A run that may not save here any more, or an optimizer, is refused before it takes the lock. With the lock
    it would keep the other run from saving. `generations.begin` looks again, because that run may have saved
    in between.
    """
    generations.require_ours(lock.path)
    one_optimizer.require_only(lock.path, optimizer)
    lock.acquire()
    return generations.begin(lock.path)


def _describe(optimizer: ZeroOptimizer) -> dict:
    """The manifest without records. Comm: it; and where ranks own state, a description of each one's."""
    comm, here = optimizer.axes.everyone, lambda: manifest.state_here(optimizer)
    if not optimizer.has_owners:
        return from_rank_0(comm, lambda: manifest.describe(optimizer, [here()]))
    states = gather(comm, on_every_rank(comm, "the optimizer's state could not be described", here))
    return from_rank_0(comm, lambda: manifest.describe(optimizer, states))


def require_zero_optimizer(optimizer: ZeroOptimizer) -> None:
    """Raises: TypeError for anything else, such as a ZeroOptimizer that something has wrapped."""
    if not isinstance(optimizer, ZeroOptimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}: pass the ZeroOptimizer itself, which is "
            "optimizer.optimizer after accelerator.prepare(optimizer)"
        )


def _write_generation(
    folder: Path, optimizer: ZeroOptimizer, description: dict, extra: Any, keep: int
) -> None:
    """Have every rank write its records, and rank 0 where they are; or remove it all."""
    comm = optimizer.axes.everyone
    first = from_rank_0(comm, lambda: buffers.digests(optimizer.model))

    def write() -> list[Record]:
        if not folder.is_dir():
            raise FileNotFoundError(
                f"rank 0 made {folder} and this rank does not find it: save to a file system that all "
                "ranks share"
            )
        manifest.check_modules(description, optimizer.model)
        own_buffers = buffers.to_store(optimizer.model, comm.rank, first)
        path = folder / f"__{comm.rank}_0.distcp"  # as torch.distributed.checkpoint names them
        objects = {
            _extra_key(comm.rank): extra,
            extra_state.key_of(comm.rank): extra_state.collect(optimizer.model),
        }
        with closing(optimizer.shards(disjoint=True)) as own:  # after an error it is offloaded again
            shards = ((key_of(shard), shard) for shard in own)
            return records.write(path, chain(shards, own_buffers), objects)

    def finish() -> None:
        generations.put(folder / ".metadata", records.torch_metadata(found))
        manifest.write(folder, description | {"records": found})
        generations.commit(folder, keep)

    try:
        mine = on_every_rank(comm, f"{folder} could not be written", write)
        found = list(chain.from_iterable(gather(comm, mine)))
        from_rank_0(comm, finish)
    except Exception:
        if comm.rank == 0:
            generations.discard(folder)
        raise


def load(optimizer: ZeroOptimizer, path: str | Path, trust: bool = False) -> Any:
    """Continue a run from `save`, at any world size, stage, precision and layout of units; returns ``extra``.

    Collective. Parameters, optimizer state, hyperparameters and buffers become the stored ones and gradients
    are cleared. Each rank gets back its own buffers, extra state and ``extra`` if there are as many as saved,
    else rank 0's; tensors in the latter two are on the CPU. All is read once before, to verify its checksums.

    Args:
        path: the folder given to `save`, or one generation in it.
        trust: whether loading may run code, as pickle does for most classes in ``extra`` and extra state.
            Pass True only if you trust everybody who could write to ``path``.
    Memory: two records, at most 64 MiB each in fp32. Comm: Ψ at stages 1 and 2, none at others.
    Raises: what setting a module's extra state raises, and OSError where a record cannot be read again.
        Steps, saves and exports are then refused until a load has ended.
    Raises, before anything is changed: FileNotFoundError without a checkpoint; ValueError where it is of
        another model or optimizer, naming the first difference, or for a buffer that it could not write to;
        OSError where it is damaged, naming the record and the last good generation, or where ``extra`` needs
        ``trust``; RuntimeError inside full_params() or inference_mode(), and where a parameter or module was
        replaced or added after construction.
    """
    require_zero_optimizer(optimizer)
    optimizer.require_idle("load")
    comm = optimizer.axes.everyone
    folder = from_rank_0(comm, lambda: generations.find(Path(path).resolve()))
    stored = _verified(comm, folder, trust)
    _require_fit(stored, optimizer)
    _warn_of_dropped(optimizer.not_kept(stored["state"]), comm.rank)
    found, failed = stored["records"], f"{folder} could not be read"
    rank = comm.rank if stored["world_size"] == comm.world_size else 0
    places = [found[_extra_key(rank)][0], found[extra_state.key_of(rank)][0]]
    read = lambda: [records.read(folder, place, trust) for place in places]
    extra, states = on_every_rank(comm, failed, read)

    def fill(shards: Iterator[Shard]) -> None:
        named = ((key_of(shard), shard) for shard in shards)
        on_every_rank(comm, failed, lambda: records.fill(folder, found, named))

    with optimizer.loading():
        optimizer.replace(stored["state"], fill)
        on_every_rank(comm, failed, lambda: buffers.restore(optimizer.model, rank, folder, found))
        on_every_rank(comm, failed, lambda: extra_state.restore(optimizer.model, states))
        optimizer.replace_settings([group["options"] for group in stored["groups"]], stored["loss_scale"])
    one_optimizer.note_load(folder.parent, optimizer)
    return extra


def _verified(comm: Comm, folder: Path, trust: bool) -> dict:
    """The manifest of a checkpoint whose checksums are all right.

    Raises: OSError on every rank, with what is damaged and which generation is not.
    """
    try:
        return _verify(comm, folder, trust)
    except OSError as damage:
        for other in from_rank_0(comm, lambda: generations.others(folder)):
            with suppress(OSError, UnpicklingError):
                _verify(comm, other, trust)
                way_out = f"The last good generation is {other}: load it by that path"
                break
        else:
            way_out = "There is no other good generation: if this checkpoint is a copy, copy it again"
        error = OSError(f"{damage}. {way_out}")
        vars(error).update(vars(damage))  # its ``raised_on``
        raise error from damage


def _verify(comm: Comm, folder: Path, trust: bool) -> dict:
    """Read the manifest, and everything it lists, each rank 1/N."""
    stored = from_rank_0(comm, lambda: manifest.read(folder, trust))
    every = sorted(chain(*stored["records"].values()), key=lambda record: (record.file, record.offset))
    start, stop = (len(every) * rank // comm.world_size for rank in (comm.rank, comm.rank + 1))
    on_every_rank(comm, f"{folder} is damaged", lambda: records.verify(folder, every[start:stop]))
    return stored


def _require_fit(stored: dict, optimizer: ZeroOptimizer) -> None:
    """Raises: ValueError on every rank where the checkpoint does not fit one's model; buffers may differ."""
    problem = None
    try:
        manifest.check(stored, optimizer)
    except ValueError as error:
        problem = str(error)
    for first in filter(None, gather(optimizer.axes.everyone, problem)):
        raise ValueError(first)


def _warn_of_dropped(names: list[str], rank: int) -> None:
    """Say on rank 0 that a load drops the optimizer state of these parameters, and how to keep it."""
    if names and rank == 0:
        warn_user(
            f"the checkpoint has optimizer state of {len(names)} parameters that were frozen when this "
            f"ZeroOptimizer was built, such as {names[0]}: it is not loaded, and the next save has none of "
            "it. To keep it, build the optimizer first, and freeze them afterwards"
        )


def _extra_key(rank: int) -> str:
    return f"extra.{rank}"
