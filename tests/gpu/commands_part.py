"""Commands: what users run on a machine with a GPU, each in a process of its own."""

import os
import subprocess
import sys
import tempfile
from typing import NamedTuple

from common import LAUNCH_SECONDS, backend
from support import ROOT, guides


class Command(NamedTuple):
    """The arguments of Python, and a text that the output has to have."""

    arguments: list[str]
    says: str


REHEARSAL = "import zerolab; print(zerolab.rehearse(zerolab.models.GPT, world_size=64, stage=3).traffic)"


def _commands() -> dict[str, Command]:
    zero, example = ["-m", "zerolab"], guides.blocks("README.md", "python")[0]
    printed = guides.text("README.md").partition("It prints `")[2].partition("`")[0]
    on_one_rank = example.replace("launch(train, 2", "launch(train, 1")
    train = "train --model gpt-tiny --world-size 1 --steps 20 --trace trace.json"
    bench = "bench --model gpt-tiny --world-size 1 --rounds 3 --update fused --contestants ddp zerolab-3"
    verify = f"verify --world-size 1 2 --backend {backend()}"
    return {
        "verify": Command([*zero, *verify.split()], "All 8 are bit-identical"),
        "train": Command([*zero, *train.split()], "held-out loss"),
        "bench": Command([*zero, *bench.split()], "bytes of states off the formula         0.000"),
        "rehearse": Command(["-c", REHEARSAL], "Traffic("),
        "the README's example": Command(["-c", example], printed),
        "the same on one rank": Command(["-c", on_one_rank], "["),
    }


def commands() -> dict[str, dict]:
    """`verify`, `train`, `bench`, a rehearsal and the README's example, as users run them."""
    found = {}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory() as folder:
        for name, (arguments, says) in _commands().items():
            done = subprocess.run(
                [sys.executable, *arguments], cwd=folder, env=environment, timeout=LAUNCH_SECONDS,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            lines = done.stdout.splitlines()
            told = [line for line in lines if says in line]
            found[name] = {"returned": done.returncode, "says": bool(told), "lines": told or lines[-3:]}
    return found


def commands_missed(found: dict[str, dict]) -> list[str]:
    """The commands that failed, or did not say what they had to."""
    bad = {name: case for name, case in found.items() if case["returned"] or not case["says"]}
    return [f"{name} returned {case['returned']}: {' / '.join(case['lines'])}" for name, case in bad.items()]
