"""Loops: models as users write them, and loops of what users do, drawn at random, over NCCL on a GPU."""

import sys
import time
from pathlib import Path

from common import backend, launch

sys.path.insert(0, str(Path(__file__).parents[1]))

from drawn_loops import Tally
from support import training
from support.loops import campaign
from support.loops.plans import draw
from support.user_models import every_case

from zerolab.parity.reference import compute_deterministically

FIRST_SEED, BATCH, SECONDS = 20_261_126, 12, 60


def _compare(cases: dict, stages: tuple[int, ...]) -> dict[str, dict]:
    compute_deterministically()
    return training.compare_all(cases, stages)


def models() -> dict[str, dict]:
    """Models as users write them, at stages 2 and 3 on two ranks, against replicas in one process."""
    found: dict[str, dict] = {}
    for group, named in every_case().items():
        for name, by_stage in launch(_compare, 2, named, (2, 3))[0].items():
            found[f"{group}: {name}"] = {f"stage {stage}": differing for stage, differing in by_stage.items()}
    return found


def models_missed(found: dict[str, dict]) -> list[str]:
    return [
        f"{name}, {stage}: {differing if isinstance(differing, str) else ', '.join(differing)}"
        for name, stages in found.items()
        for stage, differing in stages.items()
        if differing
    ]


def loops() -> dict:
    """Loops of what users do, drawn at random for a minute, against replicas in one process."""
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
