"""What one rank does from its fork to its end: enter the job's world, join the group, call, report.

A rank reports by a file and an event, then holds its connections open until the launcher lets go. A rank that
raised therefore never makes its peers fail too, and one that returned early never cuts off what it has just
sent.
"""

import contextlib
import datetime
import faulthandler
import linecache
import os
import pickle
import sys
import threading
import traceback
from typing import NoReturn

from zerolab.launcher import protocol
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
        write_failure(error, protocol.path(directory, protocol.FAILURE, rank))
        kind = protocol.FAILED
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):  # the function closed it
            stream.flush()
    protocol.send_event(events, kind, rank)
    watch.join(LINGER_SECONDS)
    os._exit(0)


def exit_with_launcher(lifeline: int) -> NoReturn:
    """Wait for the launcher to let go of the lifeline, by intent or by dying, and end this process."""
    os.read(lifeline, 1)
    os._exit(0)


def call(rank: int, job: Job, directory: str) -> None:
    """Call the function inside the job's world and write what it returns."""
    enter_world(rank, job)
    import cloudpickle

    with open(protocol.path(directory, protocol.PAYLOAD), "rb") as file:
        try:
            function, args, kwargs = pickle.load(file)
        except Exception as error:
            raise RuntimeError(f"fn or its arguments cannot be rebuilt in a rank: {error}") from error
    join_group(rank, job, directory)
    result = function(*args, **kwargs)
    with open(protocol.path(directory, protocol.RESULT, rank), "wb") as file:
        try:
            cloudpickle.dump(result, file)
        except Exception as error:
            raise TypeError(
                f"its result, of type {type(result).__name__}, cannot be pickled ({error}); "
                "return numbers, strings, tensors, or lists and dicts of them"
            ) from error


def enter_world(rank: int, job: Job) -> None:
    """The caller's environment, arguments and notebook cells as they are now, not when the server started."""
    os.environ.clear()
    os.environ.update(job["environ"])
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(job["world_size"]))
    sys.argv[:] = job["argv"]
    linecache.cache.update(job["sources"])  # tracebacks show the lines of notebook cells
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # forks share numpy's state, which fresh processes would not


def join_group(rank: int, job: Job, directory: str) -> None:
    """Set threads and device, then meet the other ranks through a file: there is no port to collide on."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(job["threads"])
    use_loopback(os.environ)
    device = None
    if job["backend"] == "nccl":
        devices = torch.cuda.device_count()
        if job["world_size"] > devices:
            share_device(rank)
        device = torch.device("cuda", rank % devices)
        torch.cuda.set_device(device)
    store = dist.FileStore(protocol.path(directory, protocol.STORE), job["world_size"])
    dist.init_process_group(
        job["backend"],
        store=store,
        rank=rank,
        world_size=job["world_size"],
        timeout=FOREVER,
        device_id=device,
    )
    dist.barrier()  # else a rank that returns at once hangs up on one that is still connecting


def share_device(rank: int) -> None:
    """Let NCCL run several ranks on one GPU: it refuses only ranks of the same host, so each claims its own.

    They then talk through sockets on the loopback: right for checking results, useless for bandwidths.
    """
    os.environ |= {
        "NCCL_HOSTID": f"zl-{rank}",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def write_failure(error: BaseException, path: str) -> None:
    """Leave the exception for the launcher: last line, traceback from the user's code on, and itself."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error = error.with_traceback(trace or error.__traceback__)
    summary = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SystemExit):
        summary = f"it called sys.exit({error.code!r}) before its function returned"
    pickled = None
    try:
        import cloudpickle

        pickled = cloudpickle.dumps(error)
    except Exception:  # its text must do
        pass
    told = {
        "summary": summary,
        "traceback": "".join(traceback.format_exception(error)),
        "pickled": pickled,
        "raised_on": getattr(error, "raised_on", None),
    }
    with open(path, "wb") as file:
        pickle.dump(told, file)
