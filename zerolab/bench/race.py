"""Time the contestants: all of them in one process group, each taking a turn in every round.

The speed of a machine changes: it warms up, and other programs start and end. If contestants ran one after
another, the one that ran while the machine was idle would win. Here each round has all of them within
seconds. Their order is shuffled in each round, equally on all ranks, so no contestant always follows the same
one.

A turn is a step, or several in a row. In a training run the next step begins while the last one's messages
are under way, and a turn of one step hides that: it ends when they are over.
"""

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolab import data
from zerolab.bench.contestants import FLOOR, Contestant, enter
from zerolab.bench.hosts import machine_seconds, sent_bytes
from zerolab.bench.ratios import slowest
from zerolab.devices import device
from zerolab.launcher import launch
from zerolab.models import GPT

ALIKE = 1e-3
"""Contestants further apart than this share of the way have not done the same work; rounding is far below."""

WARM_UP_ROUNDS = 3  # buffers and connections come into being, and DDP orders its buckets anew after one


@dataclass(frozen=True)
class Settings:
    """One race: the model, Adam's flags by the name of their table, and who takes part.

    ``steps``: how many a contestant takes in a turn.
    ``backend``: "gloo" or "nccl", the same at every world size, so that ratios compare one kind of device.
    ``on_hosts``: each rank is on a host of its own (hosts.py), whose cable counts what it carries.
    """

    build: Callable[[], nn.Module]
    names: tuple[str, ...]
    update: str
    world_size: int
    rounds: int
    batch: int
    threads: int
    title: str = "race"
    steps: int = 1
    backend: str = "gloo"
    on_hosts: bool = False


@dataclass(frozen=True)
class Result:
    """What a race gave.

    Attributes:
        seconds: of each contestant, a step's in each round: the slowest rank's.
        cpu_seconds: the same of the processor time, all threads of a rank together; where ranks are on hosts
            of their own, a rank's part of the machine's, because there the kernel works for the cables too.
        sent_bytes: what a rank's cable carried out of its host in a step, a number a round, of the rank with
            most; nothing where ranks share a host.
        differences: how far each one's parameters ended from those of the first that communicates, as a share
            of the way that these went; of the rank where it is largest. The floor's says what it looks like
            to have trained something else.
    """

    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    sent_bytes: dict[str, list[int]]
    differences: dict[str, float]

    def odd_ones_out(self) -> list[str]:
        """Who trained something else: skipped a part of the step, or did more than was asked."""
        return [name for name, off in self.differences.items() if name != FLOOR and off > ALIKE]


class Batches:
    """Real text, cut for this rank, on its device."""

    def __init__(self, build: Callable[[], nn.Module], batch: int):
        with torch.device("meta"):
            context = cast(GPT, build()).context
        self.training = data.training_and_held_out(context, batch, seed=0)[0]

    def of(self, step: int) -> tuple[Tensor, ...]:
        return tuple(part.to(device()) for part in self.training.batch(step, dist.get_rank()))


def race(settings: Settings) -> Result:
    """Start the ranks, let the contestants train in turn, and bring the ranks' clocks together."""
    return together(launch(train_in_turn, settings.world_size, settings, backend=settings.backend))


def together(ranks: list[Result]) -> Result:
    """One result of those of all ranks: a step is over when the last rank's is."""
    names = ranks[0].seconds
    return Result(
        {name: slowest([rank.seconds[name] for rank in ranks]) for name in names},
        {name: slowest([rank.cpu_seconds[name] for rank in ranks]) for name in names},
        {name: slowest([rank.sent_bytes[name] for rank in ranks]) for name in ranks[0].sent_bytes},
        {name: max(rank.differences[name] for rank in ranks) for name in ranks[0].differences},
    )


def train_in_turn(settings: Settings) -> Result:
    """Run one rank's part of the race."""
    torch.set_num_threads(settings.threads)
    contestants = {name: enter(name, settings.build, settings.update) for name in settings.names}
    start = next(iter(contestants.values())).read()
    batches = Batches(settings.build, settings.batch)
    gc.collect()
    gc.freeze()  # what was built is no garbage: without this, each collection walks all contestants' models
    seconds: dict[str, list[float]] = {name: [] for name in settings.names}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in settings.names}
    sent: dict[str, list[int]] = {name: [] for name in settings.names} if settings.on_hosts else {}
    for number in range(-WARM_UP_ROUNDS, settings.rounds):
        first = (number + WARM_UP_ROUNDS) * settings.steps
        turn = [batches.of(first + step) for step in range(settings.steps)]
        for name in random.Random(number).sample(settings.names, len(settings.names)):
            before_bytes = sent_bytes() if settings.on_hosts else 0
            wall, cpu = timed(contestants[name], turn, processor_clock(settings))
            if number >= 0:
                seconds[name].append(wall)
                cpu_seconds[name].append(cpu)
                if settings.on_hosts:
                    dist.barrier()  # the other ranks' last messages are in the cable too
                    sent[name].append((sent_bytes() - before_bytes) // settings.steps)
        _say(settings, number + 1)
    return Result(seconds, cpu_seconds, sent, _differences(contestants, start))


def timed(
    contestant: Contestant, turn: list[tuple[Tensor, ...]], processor: Callable[[], float]
) -> tuple[float, float]:
    """A step's wall and processor seconds, of a turn from a common start to its end on the device."""
    dist.barrier()
    synchronize()
    wall, cpu = time.perf_counter(), processor()
    contestant.train(turn)
    synchronize()
    return (time.perf_counter() - wall) / len(turn), (processor() - cpu) / len(turn)


def processor_clock(settings: Settings) -> Callable[[], float]:
    """What tells the processor time of a rank so far."""
    if settings.on_hosts:
        return lambda: machine_seconds() / settings.world_size
    return time.process_time


def synchronize() -> None:
    """Wait for the device: a GPU's kernels run after the call that started them has returned."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def _say(settings: Settings, done: int) -> None:
    if dist.get_rank() == 0 and done > 0 and (done % 10 == 0 or done == settings.rounds):
        print(f"{settings.title}: round {done} of {settings.rounds}", flush=True)


def _differences(contestants: dict[str, Contestant], start: dict[str, Tensor]) -> dict[str, float]:
    """Return how far apart the same steps have left the contestants, as `Result` has it."""
    against = next((name for name in contestants if name != FLOOR), FLOOR)
    reference = contestants[against].read()
    way = _distance(reference, start)
    return {name: _distance(each.read(), reference) / way for name, each in contestants.items()}


def _distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Euclidean, over all parameters; in double precision, as small differences of large sums."""
    squares = sum((ours[name].double() - theirs[name].double()).square().sum().item() for name in theirs)
    return squares**0.5
