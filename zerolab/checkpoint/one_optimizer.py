"""A folder of checkpoints belongs to one optimizer: the next save of another would remove what it needs."""

import gc
import weakref
from pathlib import Path

from zerolab.checkpoint import generations
from zerolab.optimizer import ZeroOptimizer

_saved: dict[Path, weakref.ref[ZeroOptimizer]] = {}
"""The optimizer of this process that saved last, by folder."""
_loaded: dict[Path, weakref.WeakSet[ZeroOptimizer]] = {}
"""The optimizers of this process that have loaded, by folder."""


def note_save(path: Path, optimizer: ZeroOptimizer) -> None:
    """From now on no other optimizer may save into ``path``, as long as this one is there."""
    _saved[path] = weakref.ref(optimizer)


def note_load(path: Path, optimizer: ZeroOptimizer) -> None:
    """From now on an optimizer that has not loaded from ``path`` may not save into it."""
    _loaded.setdefault(path, weakref.WeakSet()).add(optimizer)


def require_only(path: Path, optimizer: ZeroOptimizer) -> None:
    """Check that no other optimizer needs the checkpoints in ``path``.

    One that loaded does not hinder others that loaded too: a model that is only evaluated loads the
    checkpoint of one that trains on, before or after it.
    Raises: FileExistsError where another optimizer of this process has saved there, or has loaded and this
        one has not.
    """
    if not _other(path, optimizer) or not path.is_dir() or not generations.others(path / generations.LATEST):
        return
    gc.collect()  # an optimizer that nobody refers to any more is in reference cycles
    if what := _other(path, optimizer):
        raise FileExistsError(
            f"another optimizer of this process has {what} {path}, and its checkpoint would be removed: save "
            'each optimizer into a folder of its own, such as "runs/a/generator" and "runs/a/critic". If you '
            "do not need the other one any more, delete all references to it and to its model first"
        )


def _other(path: Path, optimizer: ZeroOptimizer) -> str:
    """In words, what another optimizer that is still there has done; "" where there is none."""
    saver = _saved[path]() if path in _saved else None
    if saver is not None:
        return "" if saver is optimizer else "saved into"
    loaded = list(_loaded.get(path, ()))
    return "loaded from" if loaded and not any(each is optimizer for each in loaded) else ""
