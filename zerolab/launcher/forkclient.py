"""Start the fork server, ask it for ranks, and have it signal them, from the caller's process."""

import atexit
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from zerolab.launcher.protocol import LAUNCH, REQUEST, SIGNAL

SERVER = Path(__file__).with_name("forkserver.py")
BEFORE_START = {
    "OPENBLAS_NUM_THREADS": "1",  # a forking process has one thread
    # Have malloc keep what is freed, as CUDA's allocator does. Each step frees and asks for the same buffers
    # again, and to get them from the system page by page takes longer than to fill them.
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}
"""What only counts where it is set before a process starts; the caller's own settings go before it."""


class ForkServer:
    """A fork server process, as its caller sees it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self.socket, theirs = socket.socketpair()
        with theirs:
            environment = BEFORE_START | dict(os.environ)
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    str(SERVER),
                    str(theirs.fileno()),
                    json.dumps(list(map(str, sys.path))),
                ],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a signal to the caller's group must not end the server first
            )

    @property
    def pid(self) -> int:
        """The server's process id; every rank is a child of it."""
        return self._process.pid

    def usable(self) -> bool:
        """Return whether the server is there to serve."""
        return self._process.poll() is None

    def abandon(self) -> None:
        """In a forked copy of the caller: close the socket, so that the server sees when the caller ends."""
        self.socket.close()
        self._process.returncode = 0  # no child of this process: nothing to wait for

    def next_number(self) -> int:
        """Return a number that no other launch of this server has."""
        return next(self._numbers)

    def launch(self, number: int, world_size: int, directory: str, fds: list[int]) -> None:
        """Ask for `world_size` ranks that read their job in `directory`.

        `fds`: the event pipe's write end, the lifeline's read end, rank 0's stdout and stderr.
        """
        path = os.fsencode(directory)
        request = REQUEST.pack(LAUNCH, number, world_size, len(path))
        with self._lock, contextlib.suppress(BrokenPipeError):  # the launch sees that the server is gone
            socket.send_fds(self.socket, [request, path], fds)  # in one call, which an interrupt cannot split

    def signal(self, launch: int, rank: int, number: int) -> None:
        """Signal a rank. The server does it: it knows whether the rank's process id is still the rank's."""
        with self._lock, contextlib.suppress(OSError):  # with the server its ranks have ended
            self.socket.sendall(REQUEST.pack(SIGNAL, launch, rank, number))

    def close(self) -> None:
        """End the server, and with it every rank."""
        self.socket.close()
        self._process.wait()


_current: ForkServer | None = None
_current_lock = threading.Lock()


def current() -> ForkServer:
    """This process's server, started on first use and again if it died."""
    global _current
    with _current_lock:
        if _current is None or not _current.usable():
            if _current is not None:
                _current.close()
            _current = ForkServer()
        return _current


def current_pid() -> int | None:
    """Return the server's process id, where this process has started one."""
    return _current.pid if _current is not None else None


def shut_down() -> None:
    """End this process's server if there is one."""
    if _current is not None:
        _current.close()


def abandon() -> None:
    """In a forked copy of the caller: forget the server and a lock that another thread may have held."""
    global _current_lock
    _current_lock = threading.Lock()
    if _current is not None:
        _current.abandon()


atexit.register(shut_down)
os.register_at_fork(after_in_child=abandon)
