"""Race over cables whose rate is held: every rank runs on a host of its own (hosts.py).

``python -m zerolab.bench.cable FOLDER`` is what runs on each of them. The folder has the function to call,
and gets the result of each rank.
"""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import cloudpickle
import torch.distributed as dist

from zerolab.bench.hosts import Host
from zerolab.bench.race import Result, Settings, together, train_in_turn
from zerolab.launcher import init_process_group

PORT = 29500
TIMEOUT_SECONDS = 3600
_FUNCTION = "function"

T = TypeVar("T")


class RaceFailed(RuntimeError):
    """A rank ended with an error, or not in time. The text has its last lines."""


def race_over(made: list[Host], settings: Settings, folder: Path) -> Result:
    """Let the ranks of a race run on these hosts, and bring their clocks together. Raises: RaceFailed."""
    return together(run_over(made, partial(train_in_turn, settings), folder))


def run_over(made: list[Host], function: Callable[[], T], folder: Path) -> list[T]:
    """Call a function on each of these hosts, as one rank, and return the results. Raises: RaceFailed."""
    (folder / _FUNCTION).write_bytes(cloudpickle.dumps(function))
    running: list[subprocess.Popen] = []
    try:
        for rank in range(len(made)):
            running.append(_start(made, rank, folder))
        _wait(running, folder)
    finally:
        for process in running:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
    return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(len(made))]


def _start(made: list[Host], rank: int, folder: Path) -> subprocess.Popen:
    place = {
        "RANK": rank,
        "WORLD_SIZE": len(made),
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": made[0].address,
        "MASTER_PORT": PORT,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # else it warns that no name server knows the hosts
    }
    environment: Mapping[str, str] = {
        **os.environ,
        **{key: str(value) for key, value in place.items()},
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = made[rank].on(sys.executable, "-m", "zerolab.bench.cable", str(folder))
    with open(_said(folder, rank), "w") as said:
        return subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT)


def _wait(running: list[subprocess.Popen], folder: Path) -> None:
    """Wait for all ranks, and pass on what rank 0 prints. Raises: RaceFailed where one did not succeed."""
    end, shown = time.monotonic() + TIMEOUT_SECONDS, 0
    while any(process.poll() is None for process in running):
        _require_success(running, folder)
        if time.monotonic() > end:
            raise RaceFailed(f"the ranks took more than {TIMEOUT_SECONDS} s:\n{_end(folder, 0)}")
        text = _said(folder, 0).read_text("utf-8")
        print(text[shown:], end="", flush=True)
        shown = len(text)
        time.sleep(0.2)
    _require_success(running, folder)


def _require_success(running: list[subprocess.Popen], folder: Path) -> None:
    for rank, process in enumerate(running):
        if code := process.poll():
            raise RaceFailed(f"rank {rank} ended with exit code {code}:\n{_end(folder, rank)}")


def _said(folder: Path, rank: int) -> Path:
    return folder / f"said-{rank}"


def _result(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}"


def _end(folder: Path, rank: int) -> str:
    return "\n".join(_said(folder, rank).read_text("utf-8").splitlines()[-20:])


def main(folder: Path) -> None:
    """One rank's part."""
    init_process_group("gloo")
    function = cloudpickle.loads((folder / _FUNCTION).read_bytes())
    _result(folder, dist.get_rank()).write_bytes(pickle.dumps(function()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
