"""The parts of the report: what each measures, the seconds it may take, and what it has to show."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from census_part import census, census_missed
from common import backend
from faults_part import faults, faults_missed, mismatch, mismatch_missed
from features_part import features, features_missed, tensor_parallel, tensor_parallel_missed
from host_part import kernels, kernels_missed, waits, waits_missed
from lessons_part import lessons, lessons_missed
from loops_part import loops, loops_missed, models, models_missed
from numbers_part import collectives, jitter, jitter_missed, parity, parity_missed
from speed_part import speed, speed_missed

from zerolab.bench.machine import describe
from zerolab.launcher.gpus import visible_gpus


class Part(NamedTuple):
    """``measure`` returns what was found, and ``missed`` names each promise or target that this breaks."""

    measure: Callable
    seconds: int
    missed: Callable


def versions() -> dict:
    """The machine, torch, NCCL and the GPUs."""
    found = describe() | {"torch": torch.__version__, "cuda": torch.version.cuda, "backend": backend()}
    if visible_gpus():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["gpu"] = [torch.cuda.get_device_name(index) for index in range(visible_gpus())]
    return found


def collectives_missed(found: dict) -> list[str]:
    wrong = {size for size, ranks in found.items() if not all(each["right"] for each in ranks)}
    return [f"wrong sums on {size} ranks" for size in sorted(wrong)]


PARTS: dict[str, Part] = {  # less than eight minutes in all
    "versions": Part(versions, 15, lambda found: []),
    "collectives": Part(collectives, 30, collectives_missed),
    "mismatch": Part(mismatch, 25, mismatch_missed),
    "faults": Part(faults, 50, faults_missed),
    "census": Part(census, 30, census_missed),
    "waits": Part(waits, 30, waits_missed),
    "kernels": Part(kernels, 20, kernels_missed),
    "jitter": Part(jitter, 35, jitter_missed),
    "parity": Part(parity, 50, parity_missed),
    "features": Part(features, 60, features_missed),
    "tensor_parallel": Part(tensor_parallel, 40, tensor_parallel_missed),
    "models": Part(models, 90, models_missed),
    "loops": Part(loops, 120, loops_missed),
    "speed": Part(speed, 55, speed_missed),
    "lessons": Part(lessons, 135, lessons_missed),
}
