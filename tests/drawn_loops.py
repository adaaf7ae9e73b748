"""Loops of what users do, drawn at random: python tests/drawn_loops.py --minutes 10 --seed 0

Each seed is one loop (support/loops): a model, how it is sharded, and a sequence of actions. After every
action all ranks have the bits of plain replicas in one process, or all of them raised a clear error. Whatever
else happens is a finding: it is shrunk to the smallest loop that still shows it, and printed so that --replay
runs it. The exit code is 1 if there was any.
"""

import argparse
import os
import re
import sys
import time
from collections import Counter

from support.loops import campaign, shrinking
from support.loops.plans import Loop, Setting, draw
from support.loops.session import Report

from zerolab.launcher.gpus import BACKENDS

BATCH = 25
MOST_DIFFERENCES = 12  # how many of them are shrunk, as each may have another cause


class Tally:
    """What came of the loops so far."""

    def __init__(self, shrinks: bool, backend: str):
        self.loops = self.actions = 0
        self.seen: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.refused: Counter[tuple[str, str]] = Counter()
        self.shrinks, self.backend = shrinks, backend

    def add(self, report: Report, loop: Loop) -> None:
        self.loops += 1
        self.actions += report.actions
        self.refused.update((action, re.sub(r"\d+", "…", text)[:70]) for action, text in report.refused)
        if report.problem:
            kind = shrinking.kind_of(report)
            self.seen[kind] += 1
            if self.seen[kind] <= (MOST_DIFFERENCES if kind == "differs" else 1):
                kind = self.show(report, loop)
            self.kinds[kind] += 1

    def show(self, report: Report, loop: Loop) -> str:
        """Print a finding, shrunk; its kind."""
        print(f"\nseed {report.seed}: {report.at}\n    {report.problem}", flush=True)
        if self.shrinks:
            loop, report, trials = shrinking.shrunk(loop, report, self.backend)
            print(f"    after {trials} smaller loops: {report.problem}")
        print(f"    --replay {str(loop)!r}", flush=True)
        kind = shrinking.kind_of(report)
        names = ", ".join(action[0] for action in loop.actions)
        return f"differs after {names} at stage {loop.setting.stage}" if kind == "differs" else kind

    def text(self) -> str:
        lines = [f"\n{self.loops} loops, {self.actions} actions, {len(self.kinds)} kinds of findings"]
        lines += [f"{count:>6}  {kind}" for kind, count in self.kinds.most_common()]
        lines += [f"{sum(self.refused.values())} actions were refused with a clear error:"]
        lines += [f"{count:>6}  {action}: {text}" for (action, text), count in self.refused.most_common()]
        return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="drawn_loops.py", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="for how long to begin new loops")
    parser.add_argument("--loops", type=int, default=sys.maxsize, help="how many at the most")
    parser.add_argument("--seed", type=int, default=0, help="of the first loop; the next has the next")
    parser.add_argument("--no-shrinking", action="store_true", help="print findings as they were drawn")
    parser.add_argument("--replay", help="run this one loop, as a finding prints it")
    parser.add_argument("--backend", choices=BACKENDS, default="gloo", help="nccl lets ranks share a GPU")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    tally = Tally(not args.no_shrinking and not args.replay, args.backend)
    if args.replay:
        loop = eval(args.replay, {"Loop": Loop, "Setting": Setting, "inf": float("inf")})
        tally.add(*campaign.run([(0, loop)], args.backend), loop)
    end, seed, last = time.monotonic() + 60 * args.minutes, args.seed, args.seed + args.loops
    while not args.replay and time.monotonic() < end and seed < last:
        planned = [(each, draw(each)) for each in range(seed, min(seed + BATCH, last))]
        for report, (_, loop) in zip(campaign.run(planned, args.backend), planned, strict=True):
            tally.add(report, loop)
        seed += BATCH
    print(tally.text())
    return int(bool(tally.kinds))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
