"""Manage a folder of checkpoints: writing the next one never damages the last one.

    path/LATEST               the name of the newest complete generation, and its CRC-32
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
import zlib
from pathlib import Path

FORMAT = 3
LATEST = "LATEST"
MANIFEST = "manifest.pt"
_saved: dict[Path, str] = {}
"""The generation that this process saved last, by folder: another process may have saved there since."""
_NAME = re.compile(r"generation-\d{6,}")


def begin(path: Path) -> Path:
    """Return an empty folder for the next generation; what interrupted saves have left behind is removed.

    Raises: FileExistsError where another process has saved into ``path`` since this one did.
    """
    found = _generations(path)
    require_ours(path)
    for folder in found:
        if not (folder / MANIFEST).exists():
            _remove(folder)
    newest = max((_number(folder) for folder in found), default=0)
    folder = path / f"generation-{newest + 1:06d}"
    folder.mkdir()
    return folder


def commit(folder: Path, keep: int) -> None:
    """Make the complete ``folder`` the generation to load, and keep the newest ``keep`` generations."""
    path = folder.parent
    _sync(folder)
    put(path / LATEST, _checksummed(folder.name).encode())
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
    if not latest.exists() or latest.read_bytes() != _checksummed(folder.name).encode():
        _remove(folder)


def find(path: Path) -> Path:
    """Return the generation to load: the latest in ``path``, or ``path`` itself if it is one.

    A run that loads continues from that generation, so other processes may have saved into ``path`` before.
    Raises: FileNotFoundError where there is none; OSError where LATEST is damaged; ValueError for one that an
        older version wrote.
    """
    _saved.pop(path, None)
    _saved.pop(path.parent, None)
    if (path / MANIFEST).exists():
        return path
    if (path / ".metadata").exists():
        raise FileNotFoundError(
            f"{path} is incomplete, or of format 1, which had no {MANIFEST}; this version reads format "
            f"{FORMAT}. {_complete(path.parent)}"
        )
    try:
        folder = path / _latest(path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"no checkpoint in {path}: no save into this folder was completed") from None
    if not (folder / MANIFEST).exists():
        raise FileNotFoundError(
            f"{path / LATEST} names {folder.name}, which is not there or incomplete; {_complete(path)}"
        )
    return folder


def _latest(path: Path) -> str:
    """The name in LATEST. Without a checksum a flipped bit could name another generation, and load it."""
    text = (path / LATEST).read_text(errors="replace")
    name = text.split(" ")[0]
    if _NAME.fullmatch(name) and text == _checksummed(name):
        return name
    if _NAME.fullmatch(text):
        raise ValueError(
            f"{path} is of format 1 or 2, and this version reads format {FORMAT}: load it with the version "
            "of zerolab that saved it"
        )
    raise OSError(f"{path / LATEST} is damaged; {_complete(path)}")


def _checksummed(name: str) -> str:
    """Return what LATEST holds."""
    return f"{name} {zlib.crc32(name.encode()):08x}\n"


def _complete(path: Path) -> str:
    names = ", ".join(each.name for each in others(path / LATEST)) or "none"
    return f"complete generations: {names}. Load one of them by its own path"


def others(folder: Path) -> list[Path]:
    """Return the complete generations beside ``folder``, newest first."""
    found = _generations(folder.parent)
    return [each for each in reversed(found) if each != folder and (each / MANIFEST).exists()]


def require_ours(path: Path) -> None:
    """Raises: FileExistsError where another process has saved into ``path`` since this one did."""
    ours = _saved.get(path)
    complete = others(path / LATEST) if ours and path.is_dir() else []
    if ours and complete and _number(complete[0]) > _number(path / ours):
        raise FileExistsError(
            f"another run has saved {complete[0].name} into {path} since this one saved {ours}: give each "
            "run a folder of its own"
        )


def _generations(path: Path) -> list[Path]:
    """Return the folders of generations, complete or not, oldest first; ignore other files in ``path``."""
    return sorted((each for each in path.iterdir() if _NAME.fullmatch(each.name)), key=_number)


def _remove(folder: Path) -> None:
    """Remove a generation, its manifest first: what an interruption leaves of it is not taken for whole."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("generation-"))


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
