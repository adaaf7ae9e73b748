"""What the parts share. They run on the CPU too, over gloo and with smaller models, to be tried there."""

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import zerolab
from zerolab.launcher.gpus import visible_gpus

STAGES = (0, 1, 2, 3)
LAUNCH_SECONDS = 120
ON_A_CPU = 4
"""How many times as long everything may take on a CPU."""


def backend() -> str:
    return "nccl" if visible_gpus() else "gloo"


def patience(seconds: int) -> int:
    """How long to wait for what may take so many seconds on a GPU."""
    return seconds if visible_gpus() else ON_A_CPU * seconds


def run_command(
    command: Sequence[str], seconds: int, environment: dict[str, str], folder: Path | None = None
) -> tuple[int, str]:
    """Run a command with these variables added; its exit code, and what it printed.

    One that does not end in time is killed with its ranks, and the last line says so.
    """
    limit = patience(seconds)
    process = subprocess.Popen(
        command, cwd=folder, env=os.environ | environment, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said = process.communicate()[0] + f"\nended after {limit} seconds"
    return process.returncode, said


def launch(function: Callable, world_size: int, *args) -> list:
    return zerolab.launch(function, world_size, *args, backend=backend(), timeout=LAUNCH_SECONDS)


def on_cuda() -> bool:
    return zerolab.device().type == "cuda"


def synchronize() -> None:
    if on_cuda():
        torch.cuda.synchronize()
