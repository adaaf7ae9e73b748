"""What the parts share. They run on the CPU too, over gloo and with smaller models, to be tried there."""

from collections.abc import Callable

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


def launch(function: Callable, world_size: int, *args) -> list:
    return zerolab.launch(function, world_size, *args, backend=backend(), timeout=LAUNCH_SECONDS)


def on_cuda() -> bool:
    return zerolab.device().type == "cuda"


def synchronize() -> None:
    if on_cuda():
        torch.cuda.synchronize()
