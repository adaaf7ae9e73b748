"""Fork ranks on request from a process that has imported torch and zerolab.

Importing torch takes seconds; forking a process that has done so takes milliseconds. Forking the caller is
no option: it may have threads, CUDA and a notebook inside it, none of which survives a fork. So one small
server is started per caller. It imports zerolab again when its source has changed, so the next launch uses
the edited source. It does not import the caller's main module, so a script needs no ``__main__`` guard.

It runs as a script, and loads protocol.py and inherited.py by their paths. It talks with the caller's end
(forkclient.py) over a socket pair that only they hold: when the caller dies, however it dies, the server
reads the end of that stream, kills every rank, removes their files and exits.
"""

import contextlib
import gc
import importlib.util
import json
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple


def load(name: str) -> types.ModuleType:
    """A file of this folder, without zerolab around it and under a name that no module of the user's has."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"zerolab_launcher_{name}", path)
    assert spec is not None and spec.loader is not None  # as for every .py file
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


protocol, inherited = load("protocol"), load("inherited")


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
        self.inherited = inherited.Inherited()
        self.wake_read, self.wake_write = os.pipe()
        for fd in (self.wake_read, self.wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        """Serve until the caller's end of the socket closes."""
        poll = select.poll()  # select() refuses descriptors above 1023, and a caller may have more files open
        control = self.control.fileno()
        for fd in (control, self.wake_read):
            poll.register(fd, select.POLLIN)
        try:
            while True:
                readable = {fd for fd, _ in poll.poll()}
                if self.wake_read in readable:
                    os.read(self.wake_read, 4096)
                    self.reap()
                if control in readable and not self.serve_request():
                    return
        finally:
            self.kill_everything()

    def serve_request(self) -> bool:
        """Serve one request; return False if the caller is gone."""
        message, fds, _, _ = socket.recv_fds(self.control, protocol.REQUEST.size, 4)
        if not message:
            return False
        kind, launch, first, second = protocol.REQUEST.unpack(message)
        if kind == protocol.SIGNAL:
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
        with contextlib.suppress(OSError):  # the caller is gone, and its files with it
            job = read_job(directory)
            self.inherited.update(job["sys_path"], job["cwd"], job["modules"])
        try:
            for rank in range(world_size):
                pid = os.fork()
                if pid == 0:
                    self.become_rank(rank, directory, fds)
                self.children[pid] = Child(launch, rank)
            protocol.send_event(events, protocol.STARTED, rank)
        except OSError as error:  # no room for another process
            protocol.send_event(events, protocol.NOT_STARTED, rank, error.errno)
        for fd in others:
            os.close(fd)
        self.close_if_over(launch)

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
            job = read_job(directory)
            os.chdir(job["cwd"])
            sys.path[:] = job["sys_path"]
            importlib.invalidate_caches()
            from zerolab.launcher.rank import run

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
            code = os.waitstatus_to_exitcode(status)
            protocol.send_event(self.events[child.launch], protocol.DIED, child.rank, code)
            self.close_if_over(child.launch)

    def close_if_over(self, launch: int) -> None:
        """Close the event pipe of a launch that has no rank left."""
        if all(child.launch != launch for child in self.children.values()):
            os.close(self.events.pop(launch))

    def kill_everything(self) -> None:
        """The caller is gone: leave no process and no file."""
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
        for pid in self.children:
            os.waitpid(pid, 0)
            kill_group(pid)
        for directory in self.directories:
            shutil.rmtree(directory, ignore_errors=True)


def read_job(directory: str) -> Any:
    """What the caller has written down for every rank of a launch; a protocol.Job."""
    with open(protocol.path(directory, protocol.JOB), "rb") as file:
        return pickle.load(file)


def kill_group(pid: int) -> None:
    """End what a rank that is gone has left running."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def main(control_fd: str, path: str) -> None:
    """The server process: import torch, then serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle; ranks inherit this
    sys.path[:] = json.loads(path)
    with contextlib.suppress(Exception):  # without torch each rank fails by itself, and says why
        import torch._dynamo  # noqa: F401  else imported by a rank's first optimizer, for a second each
    gc.freeze()
    with socket.socket(fileno=int(control_fd)) as control:
        Server(control).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
