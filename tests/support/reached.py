"""Record which functions of zerolab each test calls, so that a broken function is met by its tests first."""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from support import ROOT

TRACED = Path(__file__).parent / "traced"
SHORT = ["-m", "not long"]  # the tests that ./zero test runs


def record(tests: Iterable[str], jobs: int, out: Path) -> None:
    """Run these tests once, and write into ``out`` what each test called and how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        paths = (TRACED, ROOT, ROOT / "tests")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "ZEROLAB_REACHED": folder,
            "OMP_NUM_THREADS": "1",
        }
        plugins = ["-p", "sitecustomize", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", "-q", *SHORT, *plugins, "-n", str(jobs)]
        subprocess.run([*command, "--timeout", "600", *tests], cwd=ROOT, env=environment)
        lines = [line for path in Path(folder).iterdir() for line in path.read_text().splitlines()]
    out.write_text(json.dumps(merged(lines)))


def merged(lines: Iterable[str]) -> dict[str, dict]:
    """By test the seconds it took, and by module of zerolab and first line of a function the tests.

    A line without all its fields is left out: tests kill processes, and limit the size of files.
    """
    phases: dict[str, dict[str, float]] = defaultdict(dict)
    called: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for line in lines:
        match line.split("\t"):
            case ["took", test, phase, seconds, "end"]:
                phases[test][phase] = float(seconds)
            case ["called", test, path, number, "end"]:
                called[path][int(number)].add(test)
    return {
        "seconds": {test: sum(each.values()) for test, each in phases.items()},
        "called": {
            path: {str(first): sorted(tests) for first, tests in functions.items()}
            for path, functions in called.items()
        },
    }


def tests_of(recorded: dict[str, dict], path: str, first: int, last: int) -> list[str]:
    """The tests that called a function of a module that begins on one of these lines; the quickest first."""
    found = {
        test
        for line, tests in recorded["called"].get(path, {}).items()
        if first <= int(line) <= last
        for test in tests
        if test in recorded["seconds"]
    }
    return sorted(found, key=lambda test: (recorded["seconds"][test], test))
