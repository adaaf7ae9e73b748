"""Loops: models as users write them, and loops of what users do, drawn at random, over NCCL on a GPU."""

import sys
import time
from pathlib import Path
from unittest.mock import patch

from common import backend, launch

sys.path.insert(0, str(Path(__file__).parents[1]))

from drawn_loops import Tally
from support import training
from support.loops import campaign
from support.loops.plans import draw
from support.user_models import every_case

from zerolab.parity.reference import compute_deterministically

FIRST_SEED, BATCH, SECONDS = 20_261_126, 6, 45

WITHOUT_FOREACH = {"parameters of a class of their own"}
"""On a GPU torch updates parameters with its foreach kernels, and those of other classes one by one. The bits
differ, so the engine is told to update one by one, too.
"""


def _compare(cases: dict, stages: tuple[int, ...]) -> dict[str, dict]:
    compute_deterministically()
    one_by_one = {name: cases[name] for name in cases if name in WITHOUT_FOREACH}
    found = training.compare_all({name: cases[name] for name in cases if name not in one_by_one}, stages)
    with patch.dict(training.DEFAULTS, foreach=False):
        return found | training.compare_all(one_by_one, stages)


def models() -> dict:
    """Models as users write them, at stages 2 and 3 on two ranks, against replicas in one process."""
    every, differ = every_case(), {}
    for group, named in every.items():
        for rank in launch(_compare, 2, named, (2, 3)):
            for name, by_stage in rank.items():
                differ |= {f"{group}: {name}, stage {at}": what for at, what in by_stage.items() if what}
    return {"models": sum(map(len, every.values())), "differ": differ}


def models_missed(found: dict) -> list[str]:
    """A model differs in the parameters that are named, or it failed with an error."""
    return [
        f"{name}: {what if isinstance(what, str) else ', '.join(what)}"
        for name, what in found["differ"].items()
    ]


def loops() -> dict:
    """Loops of what users do, drawn at random for 45 seconds, against replicas in one process."""
    tally, seed, end = Tally(shrinks=False, backend=backend()), FIRST_SEED, time.monotonic() + SECONDS
    findings = []
    while time.monotonic() < end:
        planned = [(each, draw(each)) for each in range(seed, seed + BATCH)]
        for report, (_, loop) in zip(campaign.run(planned, backend()), planned, strict=True):
            tally.add(report, loop)
            if report.problem:
                findings.append(f"seed {report.seed}, {report.at}: {report.problem}")
        seed += BATCH
    return {"first seed": FIRST_SEED, "loops": tally.loops, "actions": tally.actions, "findings": findings}


def loops_missed(found: dict) -> list[str]:
    return found["findings"]
