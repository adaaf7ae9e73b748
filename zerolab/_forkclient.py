"""The caller's end of the fork server: starts it, asks it for ranks, has it signal them."""

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading

from zerolab import _forkserver
from zerolab._forkserver import LAUNCH, REQUEST, SIGNAL


class ForkServer:
    """A fork server process, as its caller sees it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._launches = 0
        self.socket, theirs = socket.socketpair()
        with theirs:
            environment = {"OPENBLAS_NUM_THREADS": "1"} | dict(os.environ)  # a forking process has one thread
            self._process = subprocess.Popen(
                [sys.executable, "-P", _forkserver.__file__, str(theirs.fileno()), json.dumps(sys.path)],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # the terminal's Ctrl-C is the caller's to handle
            )

    @property
    def pid(self) -> int:
        """The server's process id; every rank is a child of it."""
        return self._process.pid

    def usable(self) -> bool:
        """Whether this server is ours (not inherited through a fork) and alive."""
        return self.owner == os.getpid() and self._process.poll() is None

    def launch(self, world_size: int, directory: str, fds: list[int]) -> int:
        """Ask for `world_size` ranks that read their job in `directory`; returns the launch's number.

        `fds`: the event pipe's write end, the lifeline's read end, rank 0's stdout and stderr.
        """
        path = os.fsencode(directory)
        with self._lock:
            self._launches += 1
            request = REQUEST.pack(LAUNCH, self._launches, world_size, len(path))
            socket.send_fds(self.socket, [request], fds)
            self.socket.sendall(path)
            return self._launches

    def signal(self, launch: int, rank: int, number: int) -> None:
        """Signal a rank; the server knows whether it still exists, so a recycled process id is never hit."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            self.socket.sendall(REQUEST.pack(SIGNAL, launch, rank, number))

    def close(self) -> None:
        """End the server, and with it every rank."""
        self.socket.close()
        if self.owner == os.getpid():
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
    """The server's process id, where this process has started one."""
    return _current.pid if _current is not None else None


def shut_down() -> None:
    """End this process's server if there is one."""
    if _current is not None:
        _current.close()


atexit.register(shut_down)
# A forked copy of the caller must not hold the socket: the server would not see the caller die.
os.register_at_fork(after_in_child=lambda: _current and _current.socket.close())
