"""Measure the engine's own share of a step: what is neither computation nor communication.

There are two measurements; each misses something that the other one finds. On one rank nothing is sent, and a
step is the plain loop's computation and what the engine adds. So the ratio of its time to the floor's, in
each round, has all of the engine's share except what only several ranks cause. On several ranks a profile
gives the time that a rank's main thread spent in each file. Profiling makes Python calls slower and leaves
kernels as they are, so the engine's share by profile is an upper bound.
"""

import cProfile
import pstats
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from zerolab.bench.contestants import FLOOR, enter
from zerolab.bench.race import WARM_UP_ROUNDS, Batches, Settings, race
from zerolab.bench.ratios import Spread, pairwise
from zerolab.launcher import launch

PROFILED_STEPS = 10
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Shares:
    """Seconds of rank 0's main thread in a step, by whose code it was in."""

    compute: float
    wire: float
    engine: float

    @property
    def engine_share(self) -> float:
        return self.engine / (self.compute + self.wire + self.engine)


def on_one_rank(settings: Settings, names: list[str]) -> dict[str, Spread]:
    """Return the ratio of each contestant's step to the floor's on one rank, which sends nothing."""
    names = [FLOOR, *names]
    title = f"{settings.title} on one rank"
    found = race(replace(settings, world_size=1, names=tuple(names), title=title))
    return {name: pairwise(found.seconds[name], found.seconds[FLOOR]) for name in names[1:]}


def by_profile(settings: Settings, name: str) -> Shares:
    """Where a step's time goes on rank 0, at the race's world size."""
    return launch(_profile, settings.world_size, settings, name, backend=settings.backend)[0]


def _profile(settings: Settings, name: str) -> Shares:
    """Run one rank's part; all ranks profile, so that none waits for a slower one."""
    torch.set_num_threads(settings.threads)
    contestant = enter(name, settings.build, settings.update)
    batches = Batches(settings.build, settings.batch)
    for step in range(WARM_UP_ROUNDS):
        contestant.step(batches.of(step))
    prepared = [batches.of(WARM_UP_ROUNDS + step) for step in range(PROFILED_STEPS)]
    profile = cProfile.Profile()
    for batch in prepared:
        dist.barrier()
        with torch.autograd.set_multithreading_enabled(False):  # else a GPU's hooks run in another thread
            profile.enable()
            contestant.step(batch)
            profile.disable()
    return attribute(pstats.Stats(profile), PROFILED_STEPS)


def attribute(stats: pstats.Stats, steps: int) -> Shares:
    """Add up a profile's own times by bucket; a built-in function counts to the code that called it."""
    seconds = {"compute": 0.0, "wire": 0.0, "engine": 0.0}
    for (file, _, _), (_, _, own_seconds, _, callers) in stats.stats.items():  # type: ignore[attr-defined]  # not in typeshed
        if file != "~":  # which is where a profile puts what is not written in Python
            seconds[bucket(file)] += own_seconds
            continue
        for (calling_file, _, _), (_, _, from_there, _) in callers.items():
            seconds[bucket(calling_file)] += from_there
    return Shares(**{name: total / steps for name, total in seconds.items()})


def bucket(file: str) -> str:
    """Whose code a file is. A thread is only ever waited for here by who waits for its messages."""
    path = Path(file)
    if path.name == "threading.py" or {"torch", "distributed"} <= set(path.parts):
        return "wire"
    if not path.is_relative_to(_PACKAGE):
        return "compute"
    place = path.relative_to(_PACKAGE).parts[0]
    if place == "collectives":
        return "wire"
    return "compute" if place in ("models.py", "bench") else "engine"
