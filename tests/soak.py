"""A hundred random faults in a row: python tests/soak.py --faults 100 --seed 0 --out benchmarks/results

In each fault one rank of a training run is killed, raises, or hangs (support/faults.py). The parent has to
name that rank, no process and no file may stay, and training from the last checkpoint has to end with the
bits of training without a fault. There are 486 kinds of faults. They come in an order that the seed decides,
and begin again after the last. The step and the call of each are drawn. The exit code is 1 if anything was
wrong.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from support import faults
from support.faults import KINDS, PHASES, STAGES, STEPS, Fault, Outcome

import zerolab
from zerolab.bench import machine

WORLD_SIZES = (2, 3, 4)


def planned_faults(seed: int) -> Iterator[Fault]:
    """Every kind in every phase on every rank of every world size at every stage, in the seed's order."""
    chance = random.Random(seed)
    ranks = [(size, rank) for size in WORLD_SIZES for rank in range(size)]
    every = list(itertools.product(KINDS, PHASES, ranks, STAGES))
    while True:
        for kind, phase, (size, rank), stage in chance.sample(every, len(every)):
            step, call = chance.randrange(STEPS), chance.randrange(faults.calls_of(phase))
            yield Fault(kind, phase, size, rank, stage, step, call, late=chance.random() < 0.5)


def run_all(planned: Iterator[Fault], deadline_seconds: float) -> Iterator[Outcome]:
    """Run with one fault after the other, and judge each."""
    with tempfile.TemporaryDirectory() as scratch:
        launches = tempfile.tempdir = os.path.join(scratch, "launches")
        os.mkdir(launches)
        try:
            zerolab.launch(int, 1, backend="gloo")  # the first launch takes seconds longer
            for number, fault in enumerate(planned):
                folder = Path(scratch, str(number))
                outcome = faults.run_with(fault, folder, deadline_seconds)
                faults.judge([outcome], [folder])
                outcome.left += os.listdir(launches)
                yield outcome
        finally:
            tempfile.tempdir = None


@dataclass
class Soak:
    """One soak: how it was run, where, and what came of it."""

    command: str
    deadline_seconds: float
    machine: dict
    outcomes: list[Outcome] = field(default_factory=list)

    def summary(self) -> dict:
        """How many faults there were, how many were named, what was left or lost; and the seconds."""
        by_kind = {kind: [o.seconds for o in self.outcomes if o.fault.kind == kind] for kind in KINDS}
        return {
            "faults": len(self.outcomes),
            "named_rightly": sum(outcome.named_rightly for outcome in self.outcomes),
            "left_over": sum(len(outcome.left) for outcome in self.outcomes),
            "lost": sum(bool(outcome.lost) for outcome in self.outcomes),
            "median_and_most_seconds": {
                kind: [round(statistics.median(seconds), 2), round(max(seconds), 2)]
                for kind, seconds in by_kind.items()
                if seconds
            },
        }

    def cell(self, kind: str, phase: str) -> str:
        """Of how many faults how many were named rightly."""
        faults = [(outcome.fault, outcome.named_rightly) for outcome in self.outcomes]
        here = [named for f, named in faults if kind in (f.kind, "all") and phase in (f.phase, "all")]
        return f"{sum(here)} of {len(here)}"

    def text(self) -> str:
        """The report, in Markdown."""
        phases, found = (*PHASES, "all"), self.summary()
        table = [["fault in", *phases], ["---", *["---:"] * len(phases)]]
        table += [[kind, *(self.cell(kind, phase) for phase in phases)] for kind in (*KINDS, "all")]
        seconds = [f"{kind} {a} and {b}" for kind, (a, b) in found["median_and_most_seconds"].items()]
        wrong = [f"- WRONG: {outcome.fault}: {each}" for outcome in self.outcomes for each in outcome.wrong]
        return "\n".join([
            f"`{self.command}` on {machine.in_words(self.machine)}.", "",
            "How many faults were named, of how many: the rank, that alone, and what happened to it.", "",
            *(f"| {' | '.join(row)} |" for row in table), "",
            f"- Named rightly: {found['named_rightly']} of {found['faults']}.",
            f"- Left over, processes and files: {found['left_over']}.",
            f"- Lost, checkpoints that did not go on to the same bits: {found['lost']}.",
            f"- Seconds to the report, median and most: {', '.join(seconds)}. Counted from the fault; for a",
            f"  hang from the deadline that the launch was given, {self.deadline_seconds:g} s.",
            *wrong, "",
        ])  # fmt: skip

    def write(self, folder: Path, name: str) -> None:
        """The report, and every outcome as JSON."""
        kept = {"command": self.command, "machine": self.machine, "deadline_seconds": self.deadline_seconds}
        kept |= {"summary": self.summary(), "outcomes": list(map(as_json, self.outcomes))}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(self.text())
        (folder / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def as_json(outcome: Outcome) -> dict:
    said = {"named": outcome.named, "seconds": round(outcome.seconds, 3), "wrong": outcome.wrong}
    return asdict(outcome.fault) | said


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="soak.py", description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=100, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of their order, steps and calls")
    parser.add_argument("--deadline", type=float, default=5.0, help="seconds for a launch that hangs")
    parser.add_argument("--out", type=Path, help="a folder for the report")
    args = parser.parse_args(argv)
    if args.faults < 1:
        parser.error(f"--faults is {args.faults}: pass 1 or more")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    soak = Soak(f"python tests/soak.py {' '.join(argv)}", args.deadline, machine.describe())
    for outcome in run_all(itertools.islice(planned_faults(args.seed), args.faults), args.deadline):
        soak.outcomes.append(outcome)
        verdict = "; ".join(outcome.wrong) or "named, nothing left, nothing lost"
        place = f"{len(soak.outcomes):>{len(str(args.faults))}}"
        print(f"{place}  {outcome.fault}  {outcome.seconds:5.2f} s  {verdict}", flush=True)
    print("\n" + soak.text())
    if args.out:
        soak.write(args.out, f"soak-{args.faults}-seed-{args.seed}")
    return int(any(outcome.wrong for outcome in soak.outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
