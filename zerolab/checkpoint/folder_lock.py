"""FolderLock: only one process at a time saves into a folder."""

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

_UNSUPPORTED = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK)


class FolderLock:
    """The right to save into ``path``, from `acquire` to `release` or to the end of the process."""

    def __init__(self, path: Path):
        self.path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Make the folder, if it is not there, and lock it, where the file system can.

        Raises: BlockingIOError where another process is saving into it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise BlockingIOError(
                f"another run is saving into {self.path} now: give each run a folder of its own"
            ) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise

    def release(self) -> None:
        """Let others save. Does nothing where the lock is not held."""
        if self._descriptor is not None:
            with suppress(OSError):  # where the file system cannot lock
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a child that was forked has the file open too
            os.close(self._descriptor)
            self._descriptor = None
