"""Measure how the cost of a step grows with ranks and with parameters.

What a step costs besides its own computation should grow with parameters alone. With more ranks than cores,
ranks take turns, and wall time measures their waiting. So the sweep uses processor time: what all threads of
one rank used in a step, minus what the floor used in the same round. It includes the engine's work, the sums,
and the copies in and out of sockets. A rank's bytes grow as (N-1)/N, by 7/4 from 2 ranks to 8, so the cost
should be constant for each byte, and for each parameter.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from zerolab.bench.contestants import FLOOR
from zerolab.bench.race import Settings, race
from zerolab.bench.ratios import Spread, pairwise, spread
from zerolab.launcher.launcher import memory_bytes
from zerolab.models import GPT

WORLD_SIZES = (1, 2, 4, 8)
SHAPES = ((128, 5), (192, 7), (320, 9), (512, 10), (768, 14))
"""Width and depth of GPTs of 1M, 3M, 11M, 32M and 100M parameters."""

STEADY_BYTES = 16  # of a parameter and its gradient and Adam's two moments, at the stage that holds most


@dataclass(frozen=True)
class Point:
    """One size: for each contestant the seconds above the floor, and its step's ratio to it."""

    world_size: int
    psi: int
    floor_seconds: float
    extra_cpu_seconds: dict[str, Spread]
    ratios: dict[str, Spread]


def gpt(width: int, depth: int, context: int = 256) -> GPT:
    """Return a GPT with heads 64 wide."""
    return GPT(width=width, depth=depth, heads=width // 64, context=context)


def by_ranks(settings: Settings) -> list[Point]:
    """Measure the same model on 1 to 8 ranks."""
    return [_point(replace(settings, world_size=each)) for each in WORLD_SIZES]


def by_parameters(settings: Settings) -> list[Point]:
    """Measure models of growing size on the same ranks; skip with a message what does not fit into memory."""
    points = []
    for width, depth in SHAPES:
        larger = replace(settings, build=partial(gpt, width, depth))
        needed_bytes = STEADY_BYTES * count(larger.build) * len(settings.names) * settings.world_size
        if needed_bytes <= memory_bytes():
            points.append(_point(larger))
            continue
        print(
            f"a GPT of {count(larger.build) / 1e6:.0f}M is left out: {settings.world_size} ranks "
            f"would take up to {needed_bytes / 1e9:.0f} GB, and this machine has {memory_bytes() / 1e9:.0f}"
        )
    return points


def _point(settings: Settings) -> Point:
    psi = count(settings.build)
    title = f"{psi / 1e6:.0f}M parameters on {settings.world_size}"
    found = race(replace(settings, title=title))
    floor = found.cpu_seconds[FLOOR]
    others = [name for name in settings.names if name != FLOOR]
    return Point(
        settings.world_size,
        psi,
        spread(found.seconds[FLOOR]).median,
        {
            name: spread([a - b for a, b in zip(found.cpu_seconds[name], floor, strict=True)])
            for name in others
        },
        {name: pairwise(found.seconds[name], found.seconds[FLOOR]) for name in others},
    )


def count(build: Callable[[], nn.Module]) -> int:
    """Return the number of parameters of a model, without the memory for them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())
