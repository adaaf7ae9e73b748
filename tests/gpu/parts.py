"""The parts of the report: what each measures, the seconds it may take, and what it has to show."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from census_part import census, census_missed
from commands_part import commands, commands_missed
from common import backend
from faults_part import faults, faults_missed, mismatch, mismatch_missed
from features_part import features, features_missed, tensor_parallel, tensor_parallel_missed
from host_part import host, host_missed, kernels, kernels_missed, waits, waits_missed
from lessons_part import lessons, lessons_missed
from loops_part import loops, loops_missed, models, models_missed
from numbers_part import collectives, jitter, jitter_missed, parity, parity_missed
from speed_part import speed, speed_missed

from zerolab.bench.machine import describe
from zerolab.launcher.gpus import visible_gpus


class Part(NamedTuple):
    """A part of the report, which may take so many seconds.

    ``measure`` returns what was found, and ``missed`` names each promise or target that this breaks.
    ``is_timed``: nothing else runs beside it, because times are in what it found.
    """

    measure: Callable
    seconds: int
    missed: Callable
    is_timed: bool = False


def versions() -> dict:
    """The machine, torch, NCCL and the GPUs."""
    found = describe() | {"torch": torch.__version__, "cuda": torch.version.cuda, "backend": backend()}
    if visible_gpus():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["gpu"] = [torch.cuda.get_device_name(index) for index in range(visible_gpus())]
    return found


def collectives_missed(found: dict) -> list[str]:
    return [f"wrong sums on {size}" for size, ranks in found.items() if not all(ranks["right"])]


PARTS: dict[str, Part] = {
    "versions": Part(versions, 20, lambda found: []),
    "speed": Part(speed, 130, speed_missed, is_timed=True),
    "host": Part(host, 70, host_missed, is_timed=True),
    "lessons": Part(lessons, 240, lessons_missed),
    "loops": Part(loops, 100, loops_missed),
    "models": Part(models, 140, models_missed),
    "commands": Part(commands, 100, commands_missed),
    "parity": Part(parity, 65, parity_missed),
    "features": Part(features, 65, features_missed),
    "tensor_parallel": Part(tensor_parallel, 55, tensor_parallel_missed),
    "faults": Part(faults, 50, faults_missed),
    "jitter": Part(jitter, 45, jitter_missed),
    "census": Part(census, 45, census_missed),
    "waits": Part(waits, 40, waits_missed),
    "kernels": Part(kernels, 40, kernels_missed),
    "collectives": Part(collectives, 40, collectives_missed),
    "mismatch": Part(mismatch, 35, mismatch_missed),
}
"""The longest of those that run beside each other come first."""
