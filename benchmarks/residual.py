"""What checkpointing, offload and small buckets cost in time: python benchmarks/residual.py --out FOLDER

The first table is of data-parallel ranks, at stage 2 in fp32. The second is of ranks that share one copy of
the model, so the inputs of its blocks can be partitioned. In each table all contestants take turns in one
process group, with the same data, and a ratio is the median of those within a round.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import zerolab
from zerolab import data
from zerolab.bench.machine import describe, in_words, publish
from zerolab.bench.ratios import pairwise, slowest
from zerolab.flags import at_least, folder
from zerolab.models import GPT

DEPTH, HEADS, CONTEXT, BATCH = 9, 4, 256, 2
WARM_UP_STEPS = 2
PLAIN = "plain"


class Trained:
    """A GPT with its optimizer, and perhaps with checkpointing."""

    def __init__(
        self,
        width: int,
        parallel: zerolab.TensorParallel | None,
        checkpointing: Callable | None,
        **settings: Any,
    ):
        torch.manual_seed(0)
        self.model = GPT(width=width, depth=DEPTH, heads=HEADS, context=CONTEXT)
        if parallel is not None:
            zerolab.parallelize(self.model, parallel)
            alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
            settings |= {"tensor_parallel": parallel, "process_group": alone[dist.get_rank()]}
        self.model.checkpointing = None if checkpointing is None else checkpointing(parallel)
        self.optimizer = zerolab.ZeroOptimizer(self.model, torch.optim.Adam, stage=2, lr=1e-4, **settings)

    def step(self, batch: tuple[torch.Tensor, ...]) -> None:
        self.model(*batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer.engine.finish_gathers()

    @property
    def moved_bytes(self) -> int:
        """What was written and read outside the device until now."""
        movers = [self.model.checkpointing, self.optimizer.offload.tier]
        return sum(each.written_bytes + each.read_bytes for each in movers if each is not None)


class Row(NamedTuple):
    """One contestant on one rank: milliseconds of each step, and what it holds at most and moves in a step.

    ``peak_bytes``: states, gradients and scratch of messages, as the optimizer's meter has them.
    """

    steps: list[float]
    peak_bytes: int
    moved_bytes: int


def data_parallel(disk: Path) -> dict[str, Callable[[int], Trained]]:
    """By name, how each contestant of the first table is built."""
    of = lambda checkpointing=None, **settings: partial(
        Trained, parallel=None, checkpointing=checkpointing, **settings
    )
    on_disk = {"offload": "disk", "offload_dir": disk}
    buckets = {f"bucket_bytes=2**{power}": of(bucket_bytes=2**power) for power in (20, 16, 13)}
    return {
        PLAIN: of(),
        "checkpointing": of(lambda _: zerolab.Checkpointing()),
        "checkpoints to disk": of(lambda _: zerolab.Checkpointing(**on_disk)),
        'offload="cpu"': of(offload="cpu"),
        'offload="disk"': of(**on_disk),
        **buckets,
    }


def tensor_parallel(disk: Path) -> dict[str, Callable[[int], Trained]]:
    """The same for the second table."""
    parallel = zerolab.TensorParallel(dist.group.WORLD)
    of = lambda checkpointing=None: partial(Trained, parallel=parallel, checkpointing=checkpointing)
    divided = lambda **settings: of(lambda parallel: zerolab.Checkpointing(parallel, **settings))
    return {
        PLAIN: of(),
        "checkpointing": of(lambda _: zerolab.Checkpointing()),
        "P_a": divided(),
        "P_a to cpu": divided(offload="cpu"),
        "P_a to disk": divided(offload="disk", offload_dir=disk),
    }


def measure(contestants: Callable, width: int, rounds: int, disk: Path, same_batch: bool) -> dict[str, Row]:
    """On one rank: all contestants take turns, in an order that is shuffled for each round."""
    torch.set_num_threads(1)
    built = {name: build(width) for name, build in contestants(disk).items()}
    text = data.training_and_held_out(CONTEXT, BATCH, seed=0)[0]
    rows = {name: Row([], 0, 0) for name in built}
    for number in range(WARM_UP_STEPS + rounds):
        batch = text.batch(number, 0 if same_batch else dist.get_rank())
        for name in random.Random(number).sample(list(built), len(built)):
            took, moved_bytes = timed(built[name], batch)
            steps = [*rows[name].steps, took] if number >= WARM_UP_STEPS else []
            rows[name] = Row(steps, max(built[name].optimizer.meter.peak_by_phase.values()), moved_bytes)
    return rows


def timed(trained: Trained, batch: tuple[torch.Tensor, ...]) -> tuple[float, int]:
    """The milliseconds of one step, and the bytes that it moves out of the device and in."""
    dist.barrier()
    before, begin = trained.moved_bytes, time.perf_counter()
    trained.step(batch)
    return 1e3 * (time.perf_counter() - begin), trained.moved_bytes - before


def table(ranks: list[dict[str, Row]]) -> str:
    """A line for each contestant: times of the slowest rank, and the bytes of the rank that has most."""
    times = {name: slowest([rank[name].steps for rank in ranks]) for name in ranks[0]}
    lines = [f"{'':24}{'ms a step':>10}{'of plain':>10}{'peak MB':>10}{'MB moved':>10}"]
    for name, steps in times.items():
        ratio = pairwise(steps, times[PLAIN]).median
        peak, moved_ = (max(getattr(rank[name], what) for rank in ranks) / 1e6 for what in Row._fields[1:])
        lines.append(f"{name:24}{statistics.median(steps):10.1f}{ratio:10.2f}{peak:10.2f}{moved_:10.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--width", type=at_least(4), default=320, help="of the GPT, a multiple of its 4 heads"
    )
    parser.add_argument("--ranks", type=at_least(2), default=2)
    parser.add_argument("--rounds", type=at_least(1), default=10, help="steps of each contestant")
    parser.add_argument(
        "--disk", type=folder, default="/var/tmp", help="a folder on a disk, for what is offloaded"
    )
    parser.add_argument("--out", type=folder, help="a folder for residual.txt, made if it is not there")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    width, ranks, rounds = arguments.width, arguments.ranks, arguments.rounds
    title = f"a GPT of {DEPTH} blocks of width {width}, batches of {BATCH} x {CONTEXT}, Adam, fp32"
    text = f"{in_words(describe())}\n\n{title}, {rounds} steps of each\n"
    arguments.disk.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.disk) as disk:
        for title, contestants, same_batch in (
            (f"{ranks} data-parallel ranks, stage 2", data_parallel, False),
            (f"{ranks} tensor-parallel ranks, one copy of the model", tensor_parallel, True),
        ):
            run = (measure, ranks, contestants, width, rounds, Path(disk), same_batch)
            text += f"\n{title}\n{table(zerolab.launch(*run, backend='gloo', timeout=3600))}\n"
    publish(text, arguments.out, "residual.txt")


if __name__ == "__main__":
    main()
