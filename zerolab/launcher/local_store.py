"""Let the ranks of a job find each other through a file, if all of them run on this host.

torch's TCPStore listens on every network interface and asks for no password: whoever guesses the port can
send the ranks elsewhere. Here the store is a file that only this user can open, and nothing listens.
"""

import contextlib
import fcntl
import glob
import itertools
import os
import secrets
import socket
import stat
import tempfile
import time
from urllib.parse import quote

MEET_SECONDS = 1800.0  # as long as torch waits for ranks that come late
LOOK_SECONDS = 0.02
OLD_SECONDS = 3600.0  # after which what an ended job left is removed

_calls = itertools.count()  # a process that joins again meets the others in another file


def store_file(job: str, rank: int) -> str:
    """A file for the FileStore of `job`, a name that all its ranks know and no other job of this host has.

    Names of jobs are used again, and a job that was killed leaves its files. So rank 0 takes a fresh file
    each time, writes its name into a note, and holds a lock on the note. The system ends the lock with the
    process, and the other ranks read only a note that is locked.

    Raises: PermissionError where the folder is open to others, RuntimeError where another job has the name,
    TimeoutError where rank 0 does not come.
    """
    folder = private_folder()
    name = quote(f"{socket.gethostname()} {job} {next(_calls)}", safe="")
    note = os.path.join(folder, f"{name}.note")
    if rank != 0:
        return look_up(note)
    remove_old(folder)
    return announce(note, job)


def private_folder() -> str:
    """This user's folder for such files. Anyone can guess its name, so it must be closed to others."""
    path, user = os.path.join(tempfile.gettempdir(), f"zerolab-ranks-{os.getuid()}"), os.getuid()
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o077:
        raise PermissionError(
            f"{path} must be a folder that user {user} owns and nobody else may enter, but it is "
            f"{stat.filemode(found.st_mode)} and user {found.st_uid} owns it; remove it, or set TMPDIR to a "
            "folder of your own on every rank"
        )
    return path


def announce(note: str, job: str) -> str:
    """On rank 0: write down the name of a fresh file, under a lock that lasts as long as this process."""
    if locked_text(note):
        raise RuntimeError(
            f"another job on this host has the name {job} and still runs; end it, or give this one another "
            "MASTER_PORT"
        )
    file = f"{note}.{secrets.token_hex(8)}"
    descriptor = os.open(f"{file}.new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)  # open until the end
    fcntl.lockf(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, os.fsencode(file))
    os.replace(f"{file}.new", note)
    return file


def look_up(note: str) -> str:
    """On the other ranks: what rank 0 wrote down."""
    deadline = time.monotonic() + MEET_SECONDS
    while not (file := locked_text(note)):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank 0 did not come within {MEET_SECONDS:g} s: it has not written {note}; if it runs, see "
                "that TMPDIR is the same on every rank"
            )
        time.sleep(LOOK_SECONDS)
    return file


def locked_text(note: str) -> str | None:
    """Return what a process that still lives wrote into `note`, if there is one."""
    with contextlib.suppress(FileNotFoundError), open(note, "rb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.fsdecode(file.read())
    return None


def remove_old(folder: str) -> None:
    """Remove what ended jobs have left; the last rank to end cannot do it, as it may be killed."""
    notes = {note: locked_text(note) for note in glob.glob(os.path.join(glob.escape(folder), "*.note"))}
    living = {path for pair in notes.items() if pair[1] for path in pair}
    for path in glob.glob(os.path.join(glob.escape(folder), "*")):
        with contextlib.suppress(FileNotFoundError):
            if path not in living and time.time() - os.path.getmtime(path) > OLD_SECONDS:
                os.unlink(path)
