"""Run the command: one probe after the other, with a line for each."""

import argparse
import math
from collections.abc import Iterable

from zerolab.doctor.examine import Finding, Probe, examine
from zerolab.doctor.probes import PROBES

PROBE_SECONDS = 120.0  # a cold disk may take half a minute to import torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "--timeout",
        type=float,
        default=PROBE_SECONDS,
        metavar="SECONDS",
        help=f"after which a probe is ended, default {PROBE_SECONDS:g}",
    )


def run(args: argparse.Namespace, probes: Iterable[Probe] = PROBES) -> int:
    """Print a line for each probe as it answers; 0 if all that the course needs works, else 1."""
    if not (args.timeout > 0 and math.isfinite(args.timeout)):
        raise ValueError(f"--timeout is {args.timeout:g}; it must be a finite number of seconds above 0")
    failed = []
    for probe in probes:
        finding = examine(probe, args.timeout)
        print(report(probe, finding), flush=True)
        if probe.needed and not finding.works:
            failed.append(probe.name)
    if failed:
        print(f"\nThe course needs what failed: {', '.join(failed)}")
        return 1
    print("\nAll that the course needs works.")
    return 0


def report(probe: Probe, finding: Finding) -> str:
    """Format a probe's line; for a failed probe add how to fix it."""
    mark = "ok" if finding.works else "FAILED" if probe.needed else "no"
    line = f"{mark:<7} {probe.name:<14} {finding.text}"
    if finding.works:
        return line
    package = finding.missing.lower()
    way_out = next((each.way_out for each in PROBES if each.name == package), probe.way_out)
    return f"{line}\n{'':<7} {'':<14} way out: {way_out}"
