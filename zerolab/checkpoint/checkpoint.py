"""Checkpoints: what a run needs to go on, stored so that it can go on anywhere.

    zerolab.save(optimizer, "runs/a", extra={"step": step})
    extra = zerolab.load(optimizer, "runs/a")

What is stored is named after parameters and knows nothing of ranks, stages or units: ``model.<name>`` is the
parameter as the optimizer updates it, in fp32 also where the model keeps 16 bits, ``optimizer.<name>.<key>``
its state. Each rank writes its 1/N of every unit, and reads whatever it owns at its stage, at its N. Padding
is never stored.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from zerolab.checkpoint import generations, pieces
from zerolab.checkpoint.manifest import check, describe
from zerolab.checkpoint.pieces import Piece
from zerolab.checkpoint.together import from_rank_0, require_between_steps
from zerolab.engine.states import TrainingState
from zerolab.optimizer import ZeroOptimizer
from zerolab.optimizer.slices import Slice
from zerolab.unit import FlatUnit
from zerolab.unit.span import Span

MANIFEST = "manifest"


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
    require_between_steps(optimizer, "save")
    comm = optimizer.comm
    manifest = from_rank_0(comm, lambda: describe(optimizer))
    folder = from_rank_0(comm, lambda: generations.begin(Path(path).resolve()))
    objects = {_extra_key(comm.rank): extra} | ({MANIFEST: manifest} if comm.rank == 0 else {})
    try:
        pieces.write(folder, _shares(optimizer), objects, comm.control)
        from_rank_0(comm, lambda: generations.commit(folder, keep))
    except Exception:
        if comm.rank == 0:
            generations.discard(folder)
        raise


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
    require_between_steps(optimizer, "load")
    comm = optimizer.comm
    folder = from_rank_0(comm, lambda: generations.find(Path(path).resolve()))
    manifest = pieces.read(folder, (), [MANIFEST], comm.control)[MANIFEST]
    check(manifest, optimizer)
    own_extra = _extra_key(comm.rank if manifest["world_size"] == comm.world_size else 0)
    optimizer.zero_grad()
    optimizer.engine.gatherer.reshard(optimizer.units)
    states = [_empty_state(each, manifest, optimizer) for each in optimizer.slices]
    wanted = (piece for _, _, piece in _held(optimizer, states))
    found = _replace(optimizer, lambda: pieces.read(folder, wanted, [own_extra], comm.control))
    _adopt(optimizer, manifest, states)
    return found[own_extra]


def _extra_key(rank: int) -> str:
    return f"extra.{rank}"


def _held(optimizer: ZeroOptimizer, states: list[dict]) -> Iterator[tuple[FlatUnit, Span, Piece]]:
    """All this rank holds of each parameter and of its optimizer state, ``states``, by slice."""
    for unit in optimizer.units:
        values = unit.values()
        for span in unit.spans:
            part = span.within(unit.owned.start, unit.owned.stop)
            yield unit, span, _piece(f"model.{span.name}", unit, span, part, values[part])
    for each, state in zip(optimizer.slices, states, strict=True):
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                key = f"optimizer.{each.span.name}.{key}"
                yield each.unit, each.span, _piece(key, each.unit, each.span, each.part, value)


def _piece(key: str, unit: FlatUnit, span: Span, part: slice, values: torch.Tensor) -> Piece:
    return Piece(key, span.numel, unit.owned.start + part.start - span.offset, values)


def _shares(optimizer: ZeroOptimizer) -> Iterator[Piece]:
    """What this rank writes: of all it holds its 1/N of the unit, so that nothing is written twice."""
    states = [optimizer.state.get(each.tensor, {}) for each in optimizer.slices]
    for unit, span, piece in _held(optimizer, states):
        share = optimizer.comm.shard_range(unit.padded_numel)
        yield piece.within(share.start - span.offset, share.stop - span.offset)


@torch.no_grad()
def _empty_state(each: Slice, manifest: dict, optimizer: ZeroOptimizer) -> dict:
    """The stored optimizer state of one slice: its scalars, and tensors to read the rest into.

    Tensors that are there already are used again, so that going back to a checkpoint takes no more memory.
    """
    present, state = optimizer.state.get(each.tensor, {}), {}
    for key, value in manifest["state"].get(each.span.name, {}).items() if each.unit.trainable else ():
        if isinstance(value, torch.dtype):
            old = present.get(key)
            fits = isinstance(old, torch.Tensor) and (old.shape, old.dtype) == (each.tensor.shape, value)
            value = old if fits else torch.empty_like(each.tensor, dtype=value)
        state[key] = value
    return state


@torch.no_grad()
def _replace(optimizer: ZeroOptimizer, read: Callable[[], dict]) -> dict:
    """Overwrite what this rank owns by calling ``read``, and share it as the stage shares an update."""
    found = read()
    with optimizer.training.during(TrainingState.LOAD):
        optimizer.stage.update(optimizer.units, FlatUnit.publish)
    for unit in optimizer.units:
        unit.mark_updated()
    optimizer.trace.next_step()
    return found


def _adopt(optimizer: ZeroOptimizer, manifest: dict, states: list[dict]) -> None:
    """Hand the stock optimizer its state, in the form in which it saves it itself."""
    own = optimizer.state_dict()
    pairs = zip(own["param_groups"], manifest["groups"], strict=True)
    own["param_groups"] = [group | stored["options"] for group, stored in pairs]
    own["state"] = {index: state for index, state in enumerate(states) if state}
    if manifest["loss_scale"] is not None:
        own["loss_scale"] = manifest["loss_scale"]
    optimizer.load_state_dict(own)
