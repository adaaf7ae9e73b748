"""Generations: a folder of checkpoints in which writing the next can never harm the last.

    path/LATEST               the name of the newest complete generation
    path/.lock                locked while a process saves
    path/generation-000007/   one checkpoint; its manifest is written last

A new generation is written beside the old ones and then committed by replacing LATEST, which a file system
does at once or not at all. Whenever a process is killed, LATEST names a generation that is whole and on disk.
Two runs may not share a folder: each would remove what the other needs.
"""

import errno
import os
import re
import shutil
from pathlib import Path

LATEST = "LATEST"
MANIFEST = "manifest.pt"
_saved: dict[Path, str] = {}
"""The generation that this process saved last, by folder: another process may have saved there since."""
_NAME = re.compile(r"generation-(\d{6,})")


def begin(path: Path) -> Path:
    """An empty folder for the next generation; what interrupted saves have left behind is removed.

    Raises: FileExistsError where another process has saved into ``path`` since this one did.
    """
    found = _generations(path)
    _require_ours(path)
    for folder in found:
        if not (folder / MANIFEST).exists():
            _remove(folder)
    newest = max((_number(folder) for folder in found), default=0)
    folder = path / f"generation-{newest + 1:06d}"
    folder.mkdir()
    return folder


def commit(folder: Path, keep: int) -> None:
    """Make ``folder``, now complete, the generation to load; of the older ones keep so many that there are
    ``keep``.
    """
    path = folder.parent
    _sync(folder)
    put(path / LATEST, folder.name.encode())
    _sync(path)
    _saved[path] = folder.name
    for old in _generations(path)[:-keep]:
        _remove(old)


def put(path: Path, content: bytes) -> None:
    """Write a file so that it is there, whole and on disk, or is not there; an old one stays until then."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Remove a generation whose save failed, unless it failed after all was done."""
    latest = folder.parent / LATEST
    if not latest.exists() or latest.read_text() != folder.name:
        _remove(folder)


def find(path: Path) -> Path:
    """The generation to load: the latest in ``path``, or ``path`` itself if it is one.

    Whoever loads goes on from there, so that other processes may have saved into ``path`` before.
    Raises: FileNotFoundError where there is none.
    """
    _saved.pop(path, None)
    _saved.pop(path.parent, None)
    if (path / MANIFEST).exists():
        return path
    try:
        folder = path / (path / LATEST).read_text()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"no checkpoint in {path}: nothing was saved there to the end") from None
    if not (folder / MANIFEST).exists():
        complete = ", ".join(each.name for each in others(folder)) or "none"
        raise FileNotFoundError(
            f"{path / LATEST} names {folder.name}, which is not there or incomplete; complete are: "
            f"{complete}. Load one of those by its own path"
        )
    return folder


def others(folder: Path) -> list[Path]:
    """The complete generations beside ``folder``, newest first."""
    found = _generations(folder.parent)
    return [each for each in reversed(found) if each != folder and (each / MANIFEST).exists()]


def _require_ours(path: Path) -> None:
    ours, latest = _saved.get(path), (path / LATEST).read_text() if (path / LATEST).exists() else None
    if ours and latest and _number(path / latest) > _number(path / ours):
        raise FileExistsError(
            f"another run has saved {latest} into {path} since this one saved {ours}: give each run a folder "
            "of its own"
        )


def _generations(path: Path) -> list[Path]:
    """The folders of generations, complete or not, oldest first. Whatever else lies in ``path`` is let be."""
    return sorted((each for each in path.iterdir() if _NAME.fullmatch(each.name)), key=_number)


def _remove(folder: Path) -> None:
    """Remove a generation, its manifest first: what an interruption leaves of it is not taken for whole."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _number(folder: Path) -> int:
    return int(_NAME.fullmatch(folder.name)[1])


def _sync(folder: Path) -> None:
    """Have the file system put the folder's list of files on disk, as fsync does for a file's contents.

    Some network file systems know of no such thing.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
