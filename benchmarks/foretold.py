"""Simulated steps beside measured ones: python benchmarks/foretold.py benchmarks/results/links.json

The file is what `./zero bench --link` saved. For each rate of the cables and each stage, the engine's steps
are rehearsed and played against links of that rate. Four numbers are measured, none of them on the steps
that are foretold:

- the seconds of the floor, which computes the same and sends nothing, from the file;
- how these divide into passes and update: here, while as many ranks train at once;
- the processor time of a byte at each rate, from the file: what DDP takes beyond the floor, over its bytes.
  A rank that shares a core with others needs as many times longer for it;
- what a rank sends in a second over these cables: here, in gathers of the model with no other work.

The last needs hosts, and so root.
"""

import argparse
import json
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

import zerolab
from zerolab import models
from zerolab.bench.cable import run_over
from zerolab.bench.contestants import FLOOR, enter
from zerolab.bench.hosts import hold, hosts
from zerolab.bench.links import in_words as rate_in_words
from zerolab.bench.machine import describe, in_words, publish
from zerolab.bench.race import WARM_UP_ROUNDS, Batches
from zerolab.bench.ratios import pairwise
from zerolab.bench.report import STAGE_OF
from zerolab.collectives import Work, connect
from zerolab.engine.units import find_units
from zerolab.flags import folder
from zerolab.precision import PRECISIONS
from zerolab.simulation import Alone, Cluster, play_turn, record
from zerolab.storages import MemoryMeter
from zerolab.trace import Trace
from zerolab.unit import FlatUnit

MEASURED_STEPS = 20
LATENCY_SECONDS = 1e-4  # of one message between two processes of these hosts
UNLIMITED = 1e11  # bytes per second over a cable whose rate nothing holds: the processor is slower
UNDER_WAY = 2  # gathers at a time, as in a step of the engine


class Foretold(NamedTuple):
    """A stage's step over cables of one rate, in seconds, and two of the numbers that foretell it.

    Attributes:
        a_byte: the seconds of a rank's processor that a byte takes.
        sent: the bytes that a rank sends in a second of gathers alone; None where nothing held the rate.
    """

    bits_per_second: float | None
    stage: int
    measured: float
    simulated: float
    a_byte: float
    sent: float | None

    @property
    def error(self) -> float:
        """The simulated seconds over the measured ones, less 1."""
        return self.simulated / self.measured - 1


def foretell(saved: dict) -> Iterator[Foretold]:
    """Simulate every stage over every rate that was measured."""
    asked = saved["settings"]
    ranks_per_core = max(1.0, asked["ranks"] / saved["machine"]["cores"])
    whole = partial(record, partial(models.make, asked["model"]), precision="fp32",
                    inputs=partial(batch, asked["model"], asked["batch"]))  # fmt: skip
    alone, share = whole(world_size=1, stage=0), update_share(asked)
    turn = partial(whole, world_size=asked["ranks"], steps=1 + asked["steps"])
    recordings = {name: turn(stage=stage) for name, stage in STAGE_OF.items()}
    rates = attained(asked, [link["bits_per_second"] for link in saved["links"] if link["bits_per_second"]])
    for link in saved["links"]:
        floors = link["rounds_seconds"][FLOOR]
        floor = median(floors)
        sent = rates.get(link["bits_per_second"])
        rate = sent or UNLIMITED
        a_byte = ranks_per_core * processor_seconds_per_byte(link)
        cluster = Cluster("hosts", 1e12, 1e10, 1, rate, rate, LATENCY_SECONDS, a_byte, direct=True)
        measured = Alone(alone, (1 - share) * floor, share * floor)
        for name, stage in STAGE_OF.items():
            if name in link["rounds_seconds"]:
                simulated = play_turn(recordings[name], cluster, measured)
                over_floor = pairwise(link["rounds_seconds"][name], floors).median  # also on a busy machine
                yield Foretold(link["bits_per_second"], stage, over_floor * floor, simulated, a_byte, sent)


def processor_seconds_per_byte(link: dict) -> float:
    """What a byte that DDP sends takes from the processor, in this rank and in the kernel."""
    ddp, floor = (link["rounds_cpu_seconds"][name] for name in ("ddp", FLOOR))
    more = median(with_messages - without for with_messages, without in zip(ddp, floor, strict=True))
    return max(0.0, more / median(link["rounds_sent_bytes"]["ddp"]))


def attained(asked: dict, rates: list[float]) -> dict[float, float]:
    """By the rate of the cables in bits per second, the bytes that a rank sends in a second."""
    found: dict[float, float] = {}
    if rates:
        with tempfile.TemporaryDirectory() as name, hosts(asked["ranks"], Path(name)) as made:
            for rate in rates:
                hold(made, rate)
                found[rate] = median(run_over(made, partial(sent_in_a_second, asked["model"]), Path(name)))
    return found


def sent_in_a_second(model: str) -> float:
    """On a rank: the bytes that it sends in a second while the units of a model are gathered."""
    torch.set_num_threads(1)
    comm = connect(None, torch.device("cpu"), Trace(), MemoryMeter())
    found, ranks, fp32 = find_units(models.make(model)), comm.world_size, PRECISIONS["fp32"]
    units = [FlatUnit(each.name, index, each.parameters, ranks, fp32) for index, each in enumerate(found)]
    sent_bytes = sum(unit.flat.nbytes for unit in units) * (ranks - 1) / ranks
    rates: list[float] = []
    for _ in range(WARM_UP_ROUNDS + MEASURED_STEPS):
        dist.barrier()
        begin, under_way = time.perf_counter(), deque[Work]()
        for unit in units:
            under_way.append(comm.all_gather(unit.flat, unit))
            if len(under_way) == UNDER_WAY:
                under_way.popleft().wait()
        for work in under_way:
            work.wait()
        rates.append(sent_bytes / (time.perf_counter() - begin))
    return median(rates[WARM_UP_ROUNDS:])


def update_share(asked: dict) -> float:
    """The share of the update in a step that sends nothing, while so many ranks train at once."""
    shares = zerolab.launch(
        measure_parts, asked["ranks"], asked["model"], asked["batch"], asked["threads"], backend="gloo"
    )
    return median(shares)


def measure_parts(model: str, size: int, threads: int) -> float:
    """On a rank: what the update takes of a step of the floor."""
    torch.set_num_threads(threads)
    build = partial(models.make, model)
    floor, batches = enter(FLOOR, build, "fused"), Batches(build, size)
    parts: list[tuple[float, float]] = []
    for step in range(WARM_UP_ROUNDS + MEASURED_STEPS):
        tokens = batches.of(step)
        dist.barrier()
        begin = time.perf_counter()
        floor.backward(floor.loss(*tokens))
        updates = time.perf_counter()
        floor.update()
        floor.clear()
        parts.append((updates - begin, time.perf_counter() - updates))
    passes, update = (median(each) for each in zip(*parts[WARM_UP_ROUNDS:], strict=True))
    return update / (passes + update)


def batch(model: str, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of one rank, on the meta device."""
    tokens = torch.zeros(size, models.make(model).context, dtype=torch.long, device="meta")
    return tokens, tokens


def table(saved: dict) -> str:
    """A line for each rate and stage."""
    asked = saved["settings"]
    lines = [
        in_words(saved["machine"]),
        "",
        f"{asked['model']}, {asked['ranks']} hosts with a rank each, fp32, batch {asked['batch']}, "
        f"{asked['steps']} steps in a row",
        f"{'':10} {'stage':>6} {'ms measured':>12} {'simulated':>10} {'error':>8} {'ns a byte':>10} "
        f"{'MB a second':>12}",
    ]
    for each in foretell(saved):
        lines.append(
            f"{rate_in_words(each.bits_per_second):10} {each.stage:>6} {1e3 * each.measured:>12.1f} "
            f"{1e3 * each.simulated:>10.1f} {each.error:>+8.1%} {1e9 * each.a_byte:>10.2f} "
            f"{'-' if each.sent is None else f'{each.sent / 1e6:.1f}':>12}"
        )
    lines.append(f"MB a second: what a rank sends in gathers alone, measured on {in_words(describe())}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path, help="links.json of `./zero bench --link ... --out FOLDER`")
    parser.add_argument("--out", type=folder, help="a folder for foretold.txt")
    arguments = parser.parse_args()
    publish(table(json.loads(arguments.file.read_text("utf-8"))), arguments.out, "foretold.txt")


if __name__ == "__main__":
    main()
