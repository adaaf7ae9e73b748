"""A process that has already imported torch, and forks itself into ranks on request.

Importing torch takes seconds; forking a process that has done so takes milliseconds. Forking the caller is
not an option: it may have threads, CUDA and a notebook inside it, none of which survive a fork. So one small
server is started per caller. It imports torch and nothing of ours, hence an edited zerolab is seen by the
next launch, and it knows nothing of the caller's main module, hence a script needs no ``__main__`` guard.

This file is both ends. Run as a script it is the server, which must not import zerolab; imported, it offers
``ForkServer``, the caller's end. They talk over one socket pair that only they hold: when the caller dies,
however it dies, the server reads the end of that stream, kills every rank, removes their files and exits."""

import atexit
import contextlib
import importlib
import json
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from typing import NamedTuple

REQUEST = struct.Struct("=Biii")  # kind, launch, and two numbers that depend on the kind
LAUNCH, SIGNAL = 1, 2

EVENT = struct.Struct("=Biid")  # kind, rank, value, time.monotonic(); small enough that a pipe keeps it whole
STARTED, NOT_STARTED, DONE, FAILED, DIED = 1, 2, 3, 4, 5


class Event(NamedTuple):
    """Something that happened to a rank, as told on its launch's event pipe."""

    kind: int
    rank: int
    value: int
    time: float


def send_event(events: int, kind: int, rank: int, value: int = 0) -> None:
    """Write one event, stamped with the clock that all processes of a machine share."""
    with contextlib.suppress(BrokenPipeError):  # the caller stopped listening: nobody to tell
        os.write(events, EVENT.pack(kind, rank, value, time.monotonic()))


class ForkServer:
    """The caller's end: starts the server, asks it for ranks, has it signal them."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._launches = 0
        self.socket, theirs = socket.socketpair()
        with theirs:
            environment = {"OPENBLAS_NUM_THREADS": "1"} | dict(os.environ)  # a forking process has one thread
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno()), json.dumps(sys.path)],
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


def shut_down() -> None:
    """End this process's server if there is one."""
    if _current is not None:
        _current.close()


atexit.register(shut_down)
# A forked copy of the caller must not hold the socket: the server would not see the caller die.
os.register_at_fork(after_in_child=lambda: _current and _current.socket.close())


class Child(NamedTuple):
    """The server's record of one rank."""

    launch: int
    rank: int


class Server:
    """The loop inside the server process: fork, signal, reap, and die with the caller."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.children: dict[int, Child] = {}  # by process id, until reaped
        self.events: dict[int, int] = {}  # by launch: the write end of its event pipe
        self.directories: set[str] = set()  # of launches whose files the caller has not removed yet
        self.wake_read, self.wake_write = os.pipe()
        for fd in (self.wake_read, self.wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        """Serve until the caller's end of the socket closes."""
        try:
            while True:
                readable, _, _ = select.select([self.control, self.wake_read], [], [])
                if self.wake_read in readable:
                    os.read(self.wake_read, 4096)
                    self.reap()
                if self.control in readable and not self.serve_request():
                    return
        finally:
            self.kill_everything()

    def serve_request(self) -> bool:
        """One request; False once the caller is gone."""
        message, fds, _, _ = socket.recv_fds(self.control, REQUEST.size, 4)
        if not message:
            return False
        kind, launch, first, second = REQUEST.unpack(message)
        if kind == SIGNAL:
            for pid, child in self.children.items():
                if child == (launch, first):
                    os.kill(pid, second)
            return True
        directory = os.fsdecode(self.control.recv(second, socket.MSG_WAITALL))
        self.start_ranks(launch, first, directory, fds)
        return True

    def start_ranks(self, launch: int, world_size: int, directory: str, fds: list[int]) -> None:
        """Fork one process per rank."""
        events, *others = fds
        self.events[launch] = events
        self.directories = {directory, *filter(os.path.exists, self.directories)}
        try:
            for rank in range(world_size):
                pid = os.fork()
                if pid == 0:
                    self.become_rank(rank, directory, fds)
                self.children[pid] = Child(launch, rank)
            send_event(events, STARTED, rank)
        except OSError as error:  # no room for another process
            send_event(events, NOT_STARTED, rank, error.errno)
        for fd in others:
            os.close(fd)

    def become_rank(self, rank: int, directory: str, fds: list[int]) -> None:
        """In the child: drop what is the server's, find the job, run it. Never returns."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()  # a group of its own, so that what the rank starts ends with it
            self.control.close()
            for fd in (self.wake_read, self.wake_write, *self.events.values()):
                if fd != fds[0]:
                    os.close(fd)
            sys.modules["__main__"] = types.ModuleType("__main__")
            with open(os.path.join(directory, "job"), "rb") as file:
                job = pickle.load(file)
            sys.path[:] = job["sys_path"]
            importlib.invalidate_caches()
            from zerolab._rank import run  # the first import of zerolab in this process: today's source

            run(rank, job, directory, *fds)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(70)

    def reap(self) -> None:
        """Collect the dead, end what they left running, and tell their launches how they died."""
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            child = self.children.pop(pid)
            kill_group(pid)
            send_event(self.events[child.launch], DIED, child.rank, os.waitstatus_to_exitcode(status))
            if all(other.launch != child.launch for other in self.children.values()):
                os.close(self.events.pop(child.launch))

    def kill_everything(self) -> None:
        """The caller is gone: leave no process and no file."""
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
        for pid in self.children:
            os.waitpid(pid, 0)
            kill_group(pid)
        for directory in self.directories:
            shutil.rmtree(directory, ignore_errors=True)


def kill_group(pid: int) -> None:
    """End what a rank that is gone has left running."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def main(control_fd: str, path: str) -> None:
    """The server process: import torch, then serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = json.loads(path)
    with contextlib.suppress(ImportError):  # without torch each rank says so itself, and better
        import torch._dynamo  # noqa: F401  an optimizer's first step imports it: a second per rank, saved here
    with socket.socket(fileno=int(control_fd)) as control:
        Server(control).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
