"""Simulated steps beside measured ones: python benchmarks/foretold.py benchmarks/results/links.json

The file is what `./zero bench --link` saved. For each rate of the cables and each stage, the engine's steps
are rehearsed and played against links of that rate. Three numbers are measured, none of them on the steps
that are foretold:

- the seconds of the floor, which computes the same and sends nothing, from the file;
- how these divide into passes and update: here, while as many ranks train at once;
- the processor time of a byte at each rate, from the file: what DDP takes beyond the floor, over its bytes.
  A rank that shares a core with others needs as many times longer for it.
"""

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

import zerolab
from zerolab import models
from zerolab.bench.contestants import FLOOR, enter
from zerolab.bench.links import in_words as rate_in_words
from zerolab.bench.machine import in_words, publish
from zerolab.bench.race import WARM_UP_ROUNDS, Batches
from zerolab.bench.ratios import pairwise
from zerolab.bench.report import STAGE_OF
from zerolab.flags import folder
from zerolab.simulation import Alone, Cluster, play_turn, record

MEASURED_STEPS = 20
LATENCY_SECONDS = 1e-4  # of one message between two processes of these hosts
PAYLOAD_SHARE = 1448 / 1514  # of an Ethernet frame with TCP's and IP's headers
UNLIMITED = 1e12  # bits per second of a cable whose rate nothing holds: the processor is slower


class Foretold(NamedTuple):
    """A stage's step over cables of one rate, in seconds, with what a byte takes of a rank's processor."""

    bits_per_second: float | None
    stage: int
    measured: float
    simulated: float
    a_byte: float

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
    for link in saved["links"]:
        bits = link["bits_per_second"] or UNLIMITED
        floors = link["rounds_seconds"][FLOOR]
        floor = median(floors)
        payload = PAYLOAD_SHARE * bits / 8
        a_byte = ranks_per_core * processor_seconds_per_byte(link)
        cluster = Cluster("hosts", 1e12, 1e10, 1, payload, payload, LATENCY_SECONDS, a_byte, direct=True)
        measured = Alone(alone, (1 - share) * floor, share * floor)
        for name, stage in STAGE_OF.items():
            if name in link["rounds_seconds"]:
                simulated = play_turn(recordings[name], cluster, measured)
                over_floor = pairwise(link["rounds_seconds"][name], floors).median  # also on a busy machine
                yield Foretold(link["bits_per_second"], stage, over_floor * floor, simulated, a_byte)


def processor_seconds_per_byte(link: dict) -> float:
    """What a byte that DDP sends takes from the processor, in this rank and in the kernel."""
    ddp, floor = (link["rounds_cpu_seconds"][name] for name in ("ddp", FLOOR))
    more = median(with_messages - without for with_messages, without in zip(ddp, floor, strict=True))
    return max(0.0, more / median(link["rounds_sent_bytes"]["ddp"]))


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
        f"{'':10} {'stage':>6} {'ms measured':>12} {'simulated':>10} {'error':>8} {'ns a byte':>10}",
    ]
    for each in foretell(saved):
        lines.append(
            f"{rate_in_words(each.bits_per_second):10} {each.stage:>6} {1e3 * each.measured:>12.1f} "
            f"{1e3 * each.simulated:>10.1f} {each.error:>+8.1%} {1e9 * each.a_byte:>10.2f}"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path, help="links.json of `./zero bench --link ... --out FOLDER`")
    parser.add_argument("--out", type=folder, help="a folder for foretold.txt")
    arguments = parser.parse_args()
    publish(table(json.loads(arguments.file.read_text("utf-8"))), arguments.out, "foretold.txt")


if __name__ == "__main__":
    main()
