"""Simulated steps beside measured ones: python benchmarks/foretold.py benchmarks/results/links.json

The file is what `./zero bench --link` saved. For each rate of the cables and each stage, the engine's step is
rehearsed and played against a link of that rate. The computation is not modelled here: its seconds are those
of the floor in the same race, which computes the same and sends nothing. The contestants of a race take
turns, so a step there ends when the gathers are over that it has started.
"""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from zerolab import models
from zerolab.bench.contestants import FLOOR
from zerolab.bench.machine import in_words
from zerolab.bench.report import STAGE_OF
from zerolab.flags import folder
from zerolab.simulation import Cluster, play, record
from zerolab.simulation.recording import Recording

LATENCY_SECONDS = 1e-4  # of one message between two processes of these hosts


class Foretold(NamedTuple):
    """A stage's step over cables of one rate, in seconds."""

    bits_per_second: float
    stage: int
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """The simulated seconds over the measured ones, less 1."""
        return self.simulated / self.measured - 1


def foretell(saved: dict) -> Iterator[Foretold]:
    """Simulate every stage over every rate that was measured."""
    asked = saved["settings"]
    ranks = asked["ranks"]
    recordings = {
        name: in_turn(record(
            partial(models.make, asked["model"]), ranks, stage, "fp32",
            inputs=partial(batch, asked["model"], asked["batch"]),
        ))
        for name, stage in STAGE_OF.items()
    }  # fmt: skip
    for link in saved["links"]:
        rate = link["bits_per_second"]
        for name, stage in STAGE_OF.items():
            if rate is None or name not in link["rounds_seconds"]:
                continue
            seconds = {each: median(link["rounds_seconds"][each]) for each in (FLOOR, name)}
            cluster = Cluster("hosts", 1e12, 1e10, 1, rate / 8, rate / 8, LATENCY_SECONDS)
            step = play(recordings[name], cluster, ranks, computation_seconds=seconds[FLOOR])
            yield Foretold(rate, stage, seconds[name], step.seconds)


def in_turn(recording: Recording) -> Recording:
    """The same steps, where each ends when everything that it has started is over."""
    found = []
    for message in recording.messages:
        end = next(begin for begin in recording.begins if begin.order > message.start.order)
        inside = [wait for wait in message.waits if wait.order < end.order]
        found.append(message._replace(waits=inside or [end._replace(order=end.order - 0.5)]))
    return recording._replace(messages=found)


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
        f"{asked['model']}, {asked['ranks']} hosts with a rank each, fp32, batch {asked['batch']}",
        f"{'Gbit/s':>8} {'stage':>6} {'ms measured':>12} {'simulated':>10} {'error':>8}",
    ]
    for each in foretell(saved):
        lines.append(
            f"{each.bits_per_second / 1e9:>8g} {each.stage:>6} {1e3 * each.measured:>12.1f} "
            f"{1e3 * each.simulated:>10.1f} {each.error:>+8.1%}"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path, help="links.json of `./zero bench --link ... --out FOLDER`")
    parser.add_argument("--out", type=folder, help="a folder for foretold.txt")
    arguments = parser.parse_args()
    text = table(json.loads(arguments.file.read_text("utf-8")))
    print(text, end="")
    if arguments.out:
        (arguments.out / "foretold.txt").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
