"""Four faked GPUs: `launch` chooses NCCL as beside real ones, and the hostile backend takes its place.

The tensors stay on the CPU, which stands for the GPUs here. So this finds a collective that nobody waits for,
and an output that depends on the backend. It cannot find a tensor that was left on the CPU.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import pytest

import zerolab
from support import hostile
from support.hostile import hostile_backend
from zerolab import devices
from zerolab.before_exit import wait_for_all
from zerolab.launcher.gpus import choose_backend
from zerolab.launcher.launcher import launch
from zerolab.parity import parity

for module in (sys.modules[__name__], hostile):
    cloudpickle.register_pickle_by_value(module)

GPUS = 4


def fake_gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on this process has four GPUs. Returns the backends of its launches, which are added later."""
    chosen: list[str] = []

    def launch_on_gpus(fn: Callable, ranks: int, *args, backend: str = "auto", **kwargs) -> list[Any]:
        chosen.append(choose_backend(backend, ranks, GPUS))
        fn = partial(on_a_faked_gpu, fn) if chosen[-1] == "nccl" else fn
        return launch(fn, ranks, *args, backend="gloo", **kwargs)

    monkeypatch.setattr(zerolab, "launch", launch_on_gpus, raising=False)
    monkeypatch.setattr(parity, "launch", launch_on_gpus)
    return chosen


def on_a_faked_gpu(fn: Callable, *args, **kwargs) -> Any:
    """In a rank: call a function. What it trains meanwhile uses the native collectives, which come late."""
    devices._backends = lambda group: {"cpu": "nccl"}  # the CPU is the GPU
    with hostile_backend():
        result = fn(*args, **kwargs)
        wait_for_all()
    return result
