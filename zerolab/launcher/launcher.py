"""Run a function on several processes that form one process group, from a notebook or a script.

``launch`` writes the job down once (function, arguments, environment), asks the fork server for the ranks,
and then waits: for rank 0's output, the ranks' reports, the end of their processes, or the deadline. Whatever
ends this wait, a result, a failure, a deadline or a keyboard interrupt, the ranks are gone and their files
removed before it returns."""

import linecache
import math
import multiprocessing
import os
import sys
from collections.abc import Callable
from numbers import Integral
from pathlib import Path
from typing import Any

from zerolab.launcher import forkclient, rank
from zerolab.launcher.deadline import check_timeout
from zerolab.launcher.gpus import choose_backend, visible_gpus
from zerolab.launcher.payload import pickle_payload
from zerolab.launcher.protocol import Job
from zerolab.launcher.watch import Launch

RANK_BYTES = 50_000_000  # what a rank adds when it trains something small: its torch is the fork server's


def launch(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "auto",
    timeout: float | None = None,
    seed: int | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on `world_size` processes of one process group; the results come by rank.

    The function may be defined in a notebook cell. Rank 0 prints live, the others' output follows in rank
    order. With `backend` "nccl" the ranks' tensors on GPUs go over NCCL, those on the CPU over gloo, and
    `zerolab.device()` is the rank's GPU; ranks share GPUs where there are fewer. With "gloo" it is the CPU.
    "auto" takes NCCL where every rank can have a GPU of its own, and gloo elsewhere. `timeout` is in wall
    seconds. Without `seed` every rank of every launch draws other random numbers. With it the generators of
    Python, numpy and torch start from ``seed + rank``: the run can be repeated, and ranks still differ.

    Memory: about 50 MB per rank, and 300 MB once for torch, before what the function itself takes.
    Raises: WorkerError for the first rank that failed, LaunchTimeout at the deadline, ValueError or TypeError
    for a bad argument. No process is left running, however this ends.
    """
    check_arguments(fn, world_size, timeout)
    check_seed(seed, world_size)
    payload = pickle_payload(fn, args, kwargs)
    server = forkclient.current()  # imports torch while this process does
    gpus = 0 if backend == "gloo" else visible_gpus()
    job = make_job(world_size, choose_backend(backend, world_size, gpus), gpus, seed, payload.modules)
    with Launch(server, job, payload.pickled, timeout) as running:
        return running.results()


def make_job(world_size: int, backend: str, gpus: int, seed: int | None, modules: list[str]) -> Job:
    """Return what every rank has to know besides the call: its world, and the caller's as it is now."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    return {
        "world_size": int(world_size),
        "backend": backend,
        "gpus": gpus,
        "threads": threads_per_rank(world_size),
        "sys_path": list(sys.path),
        "modules": modules,
        "argv": list(sys.argv),
        "cwd": working_directory(),
        "environ": dict(os.environ),
        "sources": cell_sources(),
        "main_file": file and os.path.abspath(file),
        "main_name": getattr(getattr(main, "__spec__", None), "name", None),
        "seed": None if seed is None else int(seed),
    }


def working_directory() -> str:
    """Where this process is, and where its ranks will be."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError(
            "the working directory of this process was removed, and ranks begin in it: change to another "
            "with os.chdir(...)"
        ) from None


def check_arguments(fn: Any, world_size: Any, timeout: Any) -> None:
    """Refuse, before anything is started, what cannot work."""
    if rank.current is not None:
        raise RuntimeError(
            f"launch was called inside rank {rank.current} of a launch; call it from the process that "
            "starts the ranks, and use torch.distributed.new_group for a subset of them"
        )
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself asks
        raise RuntimeError(
            "launch was called while multiprocessing imports this script into a process that it spawns; put "
            'the call under `if __name__ == "__main__":`'
        )
    if not hasattr(os, "fork"):
        raise RuntimeError("launch needs fork, which this system lacks; on Windows use WSL")
    if not callable(fn):
        raise TypeError(
            f"fn must be a function that every rank calls, got {fn!r}; write launch(fn, world_size, ...)"
        )
    if isinstance(world_size, bool) or not isinstance(world_size, Integral):
        raise TypeError(f"world_size must be an int, the number of processes, got {world_size!r}")
    most = max_world_size()
    if not 1 <= int(world_size) <= most:
        raise ValueError(
            f"world_size must be between 1 and {most}, got {world_size}; a rank is a real process of about "
            f"{RANK_BYTES / 1e6:.0f} MB and this machine has {memory_bytes() / 1e9:.1f} GB"
        )
    check_timeout(timeout)


def check_seed(seed: Any, world_size: int) -> None:
    """Refuse a seed that some rank's generators could not take."""
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TypeError(f"seed must be an int or None, got {seed!r}")
    most = 2**32 - world_size  # numpy's bound, for the last rank
    if not 0 <= int(seed) <= most:
        raise ValueError(f"seed must be between 0 and {most} on {world_size} ranks, got {seed}")


def threads_per_rank(world_size: int) -> int:
    """The torch threads of each rank of a launch: OMP_NUM_THREADS, or else an equal share of the cores."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return max(1, core_count() // world_size)


def core_count() -> int:
    """Return the cores this process may use: its affinity, and a container's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    return min(cores, math.ceil(int(quota) / int(period))) if quota.isdigit() else cores


def memory_bytes() -> int:
    """Return the memory this process may use: the machine's, or its container's limit where that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read("/sys/fs/cgroup/memory.max")
    return min(physical, int(limit)) if limit.isdigit() else physical


def max_world_size() -> int:
    """As many ranks as fit into memory, and never fewer than 8."""
    return max(8, memory_bytes() // RANK_BYTES)


def cell_sources() -> dict[str, tuple]:
    """Return the source of notebook cells, which lives in linecache alone, for the tracebacks of ranks."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


def _read(path: str) -> str:
    """Return a one-line system file, or nothing where the system has none."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
