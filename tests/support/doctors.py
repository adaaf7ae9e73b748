"""The doctor run as a command, or with chosen probes in this process; and the lines of its report."""

import argparse
import os
import re
import subprocess
import sys

from conftest import PYTHONPATH

from zerolab.doctor import run
from zerolab.doctor.examine import Probe
from zerolab.doctor.probes import PROBES

LINE = re.compile(r"^(ok|FAILED|no) +((?:\S+ )*\S+) {2,}(.*)$(?:\n +way out: (.*)$)?", re.M)


def doctor(*words: str, path: str = PYTHONPATH) -> tuple[int, dict[str, tuple], str]:
    """The command in a Python of its own: its exit code, its lines by name, and all that it printed."""
    done = subprocess.run(
        [sys.executable, *words, "-m", "zerolab", "doctor"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, lines(done.stdout), done.stdout + done.stderr


def lines(printed: str) -> dict[str, tuple[str, str, str]]:
    """By name of the probe: the mark, the text and the way out."""
    return {name: (mark, text, way_out) for mark, name, text, way_out in LINE.findall(printed)}


def examined(capsys, *table: Probe, seconds: float = 60.0) -> tuple[int, dict[str, tuple]]:
    """Exit code and lines for these probes, run from this process."""
    code = run(argparse.Namespace(timeout=seconds), table)
    return code, lines(capsys.readouterr().out)


def fail(text: str):
    """A stand-in that raises, whatever it is called with."""

    def fails(*_, **__):
        raise RuntimeError(text)

    return fails


def probe(name: str) -> Probe:
    return next(each for each in PROBES if each.name == name)
