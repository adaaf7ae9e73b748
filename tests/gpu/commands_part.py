"""Commands: what users run on a machine with a GPU, each in a process of its own."""

import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common import backend, run_command
from support import ROOT, guides


class Command(NamedTuple):
    """The arguments of Python, and a text that the output has to have."""

    arguments: list[str]
    says: str


COMMAND_SECONDS = 60  # one alone took 11 to 31 on an H100, most of them to start processes
TOGETHER = 3
ON_ONE_RANK = "[6256292]"  # what the README's example prints there, which is NCCL's where there is one GPU
REHEARSAL = "import zerolab; print(zerolab.rehearse(zerolab.models.GPT, world_size=64, stage=3).traffic)"


def _commands() -> dict[str, Command]:
    zero, example = ["-m", "zerolab"], guides.blocks("README.md", "python")[0]
    printed = guides.text("README.md").partition("It prints `")[2].partition("`")[0]
    on_one_rank = example.replace("launch(train, 2", "launch(train, 1")
    train = "train --model gpt-tiny --world-size 1 --steps 20 --trace trace.json"
    bench = "bench --model gpt-tiny --world-size 1 --rounds 3 --update fused --contestants ddp zerolab-3"
    verify = f"verify --world-size 2 --backend {backend()}"
    return {
        "verify": Command([*zero, *verify.split()], "All 4 are bit-identical"),
        "train": Command([*zero, *train.split()], "held-out loss"),
        "bench": Command([*zero, *bench.split()], "bytes of states off the formula         0.000"),
        "rehearse": Command(["-c", REHEARSAL], "Traffic("),
        "the README's example": Command(["-c", example], printed),
        "the same on one rank": Command(["-c", on_one_rank], ON_ONE_RANK),
    }


def commands() -> dict[str, dict]:
    """`verify`, `train`, `bench`, a rehearsal and the README's example, as users run them."""
    commands = _commands()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(TOGETHER) as pool:
        return dict(zip(commands, pool.map(partial(_run, folder), commands.values()), strict=True))


def _run(folder: str, command: Command) -> dict:
    """What came of a command. After one that does not end the next one runs."""
    began, path = time.monotonic(), os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    arguments = [sys.executable, *command.arguments]
    returned, said = run_command(arguments, COMMAND_SECONDS, {"PYTHONPATH": path}, Path(folder))
    lines = said.splitlines()
    told = [line for line in lines if command.says in line]
    seconds = round(time.monotonic() - began, 1)
    return {"returned": returned, "says": bool(told), "seconds": seconds, "lines": told or lines[-3:]}


def commands_missed(found: dict[str, dict]) -> list[str]:
    """The commands that failed, or did not say what they had to."""
    bad = {name: case for name, case in found.items() if case["returned"] or not case["says"]}
    return [f"{name} returned {case['returned']}: {' / '.join(case['lines'])}" for name, case in bad.items()]
