"""Run the command ``python -m zerolab bench``."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from zerolab import models
from zerolab.bench import footprint, overhead, plot, sweep, table
from zerolab.bench.cable import RaceFailed
from zerolab.bench.contestants import CONTESTANTS, FLOOR, UPDATES, absent
from zerolab.bench.footprint import Footprint
from zerolab.bench.hosts import MOST_HOSTS, Unavailable
from zerolab.bench.links import by_rate, parse_rate
from zerolab.bench.machine import describe
from zerolab.bench.race import Settings, race
from zerolab.bench.report import STAGE_OF, Report, Table
from zerolab.flags import at_least, folder
from zerolab.launcher import WorkerError
from zerolab.launcher.gpus import BACKENDS, choose_backend, visible_gpus
from zerolab.launcher.launcher import check_arguments, threads_per_rank

MODELS = [name for name in models.MODELS if name.startswith("gpt")]
ROUNDS, SWEEP_ROUNDS = 40, 7
LINK_STEPS = 4  # in a turn: messages that are under way when a step ends take long on a slow cable


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of ``python -m zerolab bench``."""
    add = parser.add_argument
    add("--model", default="gpt-11m", choices=MODELS, help="default gpt-11m")
    add("--world-size", type=at_least(1), default=2, help="ranks (default 2)")
    add("--batch", type=at_least(1), default=1, help="sequences in the batch of each rank (default 1)")
    add("--rounds", type=at_least(1), help="turns of each contestant that count (default 40, in a sweep 7)")
    add("--steps", type=at_least(1), help="steps in a turn (default 1, with --link 4)")
    add("--update", default="both", choices=[*UPDATES, "both"], help="which of Adam's kernels (default both)")
    add("--contestants", nargs="+", choices=CONTESTANTS, metavar="NAME", default=list(CONTESTANTS),
        help=f"default all: {', '.join(CONTESTANTS)}")  # fmt: skip
    add("--backend", default="auto", choices=BACKENDS, help="nccl lets ranks share GPUs (default auto)")
    add("--sweep", action="store_true", help="instead of the tables, 1 to 8 ranks and 1M to 100M parameters")
    add("--link", nargs="+", metavar="RATE",
        help="instead of the tables, each rank on a host of its own, over cables of this rate, as 1Gbit; "
        "several rates are swept. Needs root")  # fmt: skip
    add("--out", type=folder, help="a folder for the numbers, the text and a plot; default: print only")


def run(args: Namespace) -> int:
    """Measure, print, and save where asked to; 1 where a rank failed."""
    check_arguments(race, args.world_size, None)
    _check_link(args)
    name = "links" if args.link else "sweep" if args.sweep else "bench"
    try:
        for report in measure(args):
            if args.out:
                save(report, args.out, name)
    except (WorkerError, Unavailable, RaceFailed) as error:
        print(f"zerolab bench: {error}", file=sys.stderr)
        return 1
    print(f"\n{table.text(report)}", end="")
    return 0


def measure(args: Namespace) -> Iterator[Report]:
    """All that the flags ask for; the report after each part, so that a run broken off keeps what it had."""
    updates = list(UPDATES) if args.update == "both" else [args.update]
    settings = Settings(
        build=partial(models.make, args.model),
        names=tuple(name for name in CONTESTANTS if name in args.contestants),
        update=updates[0],
        world_size=args.world_size,
        rounds=args.rounds or (SWEEP_ROUNDS if args.sweep else ROUNDS),
        batch=args.batch,
        threads=threads_per_rank(args.world_size),
        steps=args.steps or (LINK_STEPS if args.link else 1),
        backend=choose_backend(args.backend, args.world_size, visible_gpus()),
    )
    kept = {name: getattr(settings, name) for name in ("rounds", "steps", "threads", "backend")}
    asked = {"model": args.model, "ranks": args.world_size, "batch": args.batch, "gpus": visible_gpus()}
    report = Report(describe(), asked | kept)
    if args.link:
        names = tuple(name for name in settings.names if absent(name) is None)
        settings = replace(settings, update=updates[-1], names=names)
        for link in by_rate(settings, [parse_rate(each) for each in args.link]):
            report.links.append(link)
            yield report
        return
    if args.sweep:
        settings = replace(settings, update=updates[-1], names=(FLOOR, "ddp", *STAGE_OF))
        report.by_ranks, report.by_parameters = sweep.by_ranks(settings), sweep.by_parameters(settings)
        yield report
        return
    for update in updates:
        report.tables.append(one_table(replace(settings, update=update, title=update)))
        yield report


def _check_link(args: Namespace) -> None:
    """Raises: ValueError for rates that cannot be read, and flags that do not go with them."""
    if args.link is None:
        return
    for each in args.link:
        parse_rate(each)
    if args.sweep:
        raise ValueError("--link and --sweep are two measurements: ask for one at a time")
    if args.backend == "nccl":
        raise ValueError("--link measures gloo between hosts on one machine: leave --backend nccl out")
    if not 2 <= args.world_size <= MOST_HOSTS:
        raise ValueError(
            f"--link takes 2 to {MOST_HOSTS} hosts with a rank each, and --world-size is {args.world_size}"
        )


def one_table(settings: Settings) -> Table:
    """One table: who can take part, what each holds and sends, the race, and the engine's own share."""
    footprints, missing = _weigh_all(settings)
    if not footprints:
        reasons = ", ".join(f"{name} is {reason}" for name, reason in missing.items())
        raise ValueError(f"no contestant can take part: {reasons}; name others with --contestants")
    settings = replace(settings, names=tuple(footprints))
    result = race(settings)
    ours = [name for name in settings.names if name in STAGE_OF]
    return Table(
        update=settings.update,
        psi=sweep.count(settings.build),
        world_size=settings.world_size,
        race=result,
        absent=missing,
        footprints=footprints,
        one_rank=overhead.on_one_rank(settings, ours) if ours else {},
        shares={name: overhead.by_profile(settings, name) for name in ours},
    )


def _weigh_all(settings: Settings) -> tuple[dict[str, Footprint], dict[str, str]]:
    """The footprints, and why a contestant has none: another engine may be missing, or fail; ours may not."""
    footprints, missing = {}, {}
    for name in settings.names:
        if reason := absent(name):
            missing[name] = reason
            continue
        print(f"{settings.title}: weighing {name}", flush=True)
        try:
            footprints[name] = footprint.weigh(settings, name)
        except WorkerError as error:
            if name in STAGE_OF or name == FLOOR:
                raise
            missing[name] = f"failed: {str(error).splitlines()[0]}"
    return footprints, missing


def save(report: Report, folder: Path, name: str) -> None:
    """Write what was measured, what was printed, and a picture if matplotlib is there to draw it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(report.as_json(), indent=1) + "\n", "utf-8")
    (folder / f"{name}.txt").write_text(table.text(report), "utf-8")
    try:
        plot.draw(report, folder / f"{name}.png")
    except ImportError:
        print("no plot: it needs matplotlib, which is not installed")
