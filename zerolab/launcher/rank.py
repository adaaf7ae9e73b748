"""Run one rank from its fork to its end: set its environment, join the group, call, report.

A rank reports by a file and an event, then holds its connections open until the launcher lets go. A rank that
raised therefore never makes its peers fail too, and one that returned early never cuts off what it has just
sent.
"""

import atexit
import contextlib
import datetime
import faulthandler
import gc
import importlib.machinery
import importlib.util
import io
import linecache
import os
import pickle
import random
import sys
import threading
import traceback
from typing import NoReturn

from zerolab.before_exit import wait_for_all
from zerolab.launcher import payload, protocol
from zerolab.launcher.gpus import GROUP_BACKENDS, check_sharing, take_gpu
from zerolab.launcher.output import redirect_output
from zerolab.launcher.protocol import Job
from zerolab.launcher.rendezvous import use_loopback

LINGER_SECONDS = 2.0  # for peers to read what this rank sent last
FOREVER = datetime.timedelta(days=365)  # the launcher watches the ranks: no long step may time out

current: int | None = None  # this process's rank, where a launch started it


def run(
    rank: int, job: Job, directory: str, events: int, lifeline: int, stdout: int, stderr: int
) -> NoReturn:
    """The rank's whole life; ends the process."""
    global current
    current = rank
    atexit._clear()  # what the fork server has registered is its own
    redirect_output(rank, directory, stdout, stderr)
    stacks = open(protocol.path(directory, protocol.STACKS, rank), "w")  # noqa: SIM115  open until the end
    faulthandler.register(protocol.DUMP_SIGNAL, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks)
    watch = threading.Thread(target=exit_with_launcher, args=(lifeline,), daemon=True)
    watch.start()
    try:
        call(rank, job, directory)
        kind = protocol.DONE
    except BaseException as error:
        with contextlib.suppress(OSError):  # no room for it: the launcher says so
            write_failure(error, protocol.path(directory, protocol.FAILURE, rank))
        kind = protocol.FAILED
    flush()
    protocol.send_event(events, kind, rank)
    watch.join(LINGER_SECONDS)
    os._exit(0)


def exit_with_launcher(lifeline: int) -> NoReturn:
    """Wait until the launcher closes the lifeline pipe or ends, and end this process."""
    os.read(lifeline, 1)
    os._exit(0)


def call(rank: int, job: Job, directory: str) -> None:
    """Call the function inside the job's world and write what it returns."""
    enter_world(rank, job)
    with open(protocol.path(directory, protocol.PAYLOAD), "rb") as file:
        try:
            function, args, kwargs = payload.load_payload(file)
        except Exception as error:
            raise RuntimeError(f"fn or its arguments cannot be rebuilt in a rank: {error}") from error
    join_group(rank, job, directory)
    process = os.getpid()
    try:
        result = function(*args, **kwargs)
    finally:
        if os.getpid() != process:
            end_fork()
    wait_for_all()
    await_device()
    atexit._run_exitfuncs()  # os._exit, which ends this process, does not call them
    with open(protocol.path(directory, protocol.RESULT, rank), "wb") as file:
        try:
            payload.dump(result, file)
        except OSError as error:
            raise OSError(
                f"its result could not be written to {directory} ({error}): make room there, or set TMPDIR "
                "to another folder"
            ) from error
        except Exception as error:
            raise TypeError(
                f"its result, of type {type(result).__name__}, cannot be pickled ({error}); "
                "return numbers, strings, tensors, or lists and dicts of them"
            ) from error


def end_fork() -> NoReturn:
    """End a process that the function has forked and that came back from it: only the rank itself reports."""
    error, code = sys.exc_info()[1], 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    flush()
    os._exit(code)


def flush() -> None:
    """Write out what the function has printed, and what it has written to files that it left open.

    The fork server's objects are frozen, so the collector knows only those of this process.
    """
    files = [each for each in gc.get_objects() if type(each) in (io.TextIOWrapper, io.BufferedWriter)]
    for stream in (sys.stdout, sys.stderr, *files):
        with contextlib.suppress(Exception):  # the function closed it, or has put something else there
            stream.flush()


def await_device() -> None:
    """Let the GPU finish what the function has queued: its errors come up now, and no peer is cut off."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def enter_world(rank: int, job: Job) -> None:
    """Take over the caller's environment, arguments and notebook cells as they are now, and seed."""
    os.environ.clear()
    os.environ.update(job["environ"])
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(job["world_size"]))
    sys.argv[:] = job["argv"]
    linecache.cache.update(job["sources"])  # tracebacks show the lines of notebook cells
    name_main(job)
    seed_generators(None if job["seed"] is None else job["seed"] + rank)


def name_main(job: Job) -> None:
    """Say where the caller's main module is, for processes that multiprocessing spawns from this rank.

    They import it, as those of any script do; the rank itself does not.
    """
    main = sys.modules["__main__"]
    if job["main_file"]:
        main.__file__ = job["main_file"]
    if job["main_name"]:
        main.__spec__ = importlib.machinery.ModuleSpec(job["main_name"], None)


def seed_generators(seed: int | None) -> None:
    """Seed Python's, numpy's and torch's generators; None takes a new seed for each from the system.

    Forked ranks would otherwise go on from the fork server's state, which is the same for all.
    """
    import torch

    random.seed(seed)
    if importlib.util.find_spec("numpy"):
        importlib.import_module("numpy").random.seed(seed)
    if seed is None:
        torch.seed()
    else:
        torch.manual_seed(seed)


def join_group(rank: int, job: Job, directory: str) -> None:
    """Set threads and GPU, then meet the other ranks through a file, so that no port can be taken."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(job["threads"])
    use_loopback(os.environ)
    if job["backend"] == "nccl":
        # The caller watches the ranks. NCCL's own watchdog would abort those whose peer is gone.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        take_gpu(rank, job["world_size"], job["gpus"])
    store = dist.FileStore(protocol.path(directory, protocol.STORE), job["world_size"])
    dist.init_process_group(
        GROUP_BACKENDS[job["backend"]],
        store=store,
        rank=rank,
        world_size=job["world_size"],
        timeout=FOREVER,
    )
    # A rank that returned at once would close its connection to one that is still connecting. Over gloo: NCCL
    # starts when it is first used.
    dist.all_reduce(torch.zeros(1))
    if job["backend"] == "nccl":
        check_sharing(job["world_size"], job["gpus"])


def write_failure(error: BaseException, path: str) -> None:
    """Leave the exception for the launcher: last line, traceback from the user's code on, and itself."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error = error.with_traceback(trace or error.__traceback__)
    summary = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SystemExit):
        summary = f"it called sys.exit({error.code!r}) before its function returned"
    pickled = io.BytesIO()
    with contextlib.suppress(Exception):  # its text must do
        payload.dump(error, pickled)
    report = {
        "summary": summary,
        "traceback": "".join(traceback.format_exception(error)),
        "pickled": pickled.getvalue(),
        "raised_on": getattr(error, "raised_on", None),
    }
    with open(path, "wb") as file:
        pickle.dump(report, file)
