"""The messages between the caller, the fork server and the ranks of a launch, and their files.

The caller sends requests to the fork server over a socket pair. The server and the ranks send events to the
caller over a pipe. Larger data is in files, in a folder that each launch makes for itself.

The caller and the ranks import this module like any other. The fork server loads this file by its path,
because it imports zerolab only when it is asked for ranks, and again whenever the source has changed. So this
module may import the standard library only.
"""

import contextlib
import os
import signal
import struct
import time
from typing import Any, NamedTuple, TypedDict

REQUEST = struct.Struct("=Biii")  # kind, launch, and two numbers that depend on the kind
LAUNCH = 1  # world size, length of the folder's name, which follows
SIGNAL = 2  # rank, number of the signal

EVENT = struct.Struct("=Biid")  # kind, rank, value, time.monotonic(); small enough that a pipe keeps it whole
STARTED = 1  # from the server: all ranks were forked
NOT_STARTED = 2  # from the server: this rank and those after it were not; value is the errno
DONE = 3  # from a rank: its result is written
FAILED = 4  # from a rank: its failure is written
DIED = 5  # from the server: the rank's process ended; value is its exit code, negative for a signal

# Asks a rank for its stack. faulthandler answers even while C code holds the interpreter.
DUMP_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)

JOB, PAYLOAD, STORE = "job", "payload", "store"  # files of the launch: a pickled Job, the call, the FileStore
RESULT, FAILURE, STACKS, STDOUT, STDERR = "result", "failure", "stacks", "stdout", "stderr"  # of each rank


class Job(TypedDict):
    """What every rank has to know besides the call.

    It is a plain dict at run time, so the server can unpickle it without zerolab.
    """

    world_size: int
    backend: str  # "gloo", or "nccl" for both
    gpus: int  # of this host
    threads: int
    sys_path: list[str]
    modules: list[str]  # of zerolab, that the call refers to
    argv: list[str]
    cwd: str
    environ: dict[str, str]
    sources: dict[str, Any]  # linecache's entries for notebook cells
    main_file: str | None  # of the caller's main module, which ranks do not run
    main_name: str | None  # by which python -m found it
    seed: int | None


class Event(NamedTuple):
    """Something that happened to a rank."""

    kind: int
    rank: int
    value: int
    time: float


def send_event(pipe: int, kind: int, rank: int, value: int = 0) -> None:
    """Write one event, stamped with the clock that all processes of a machine share."""
    with contextlib.suppress(BrokenPipeError):  # the caller no longer reads
        os.write(pipe, EVENT.pack(kind, rank, value, time.monotonic()))


def path(directory: str, name: str, rank: int | None = None) -> str:
    """Return a file of a launch, or of one of its ranks."""
    return os.path.join(directory, name if rank is None else f"{name}-{rank}")
