"""The notebooks, run again on this machine and compared with their committed outputs by nbval."""

import importlib.util
import os
import re
import subprocess
import sys

from support import ROOT

from zerolab.launcher.gpus import visible_gpus

NEEDED = ("nbval", "ipykernel", "matplotlib", "xdist")
MOST_AT_ONCE = 6


def lessons() -> dict:
    """The notebooks under nbval: all of them on a GPU, the first one without."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        return {"skipped": f"not installed: {', '.join(absent)}"}
    names = sorted((ROOT / "notebooks").glob("*.ipynb"))[: None if visible_gpus() else 1]
    at_once = min(MOST_AT_ONCE, max(1, (os.cpu_count() or 1) // 2), len(names))
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", str(at_once), "--dist",
        "loadscope", "--nbval", "--nbval-sanitize-with", str(ROOT / "tests" / "nbval_sanitize.cfg"),
        *map(str, names),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = done.stdout.splitlines()
    failed = [re.sub(r"\x1b\[\d*m", "", line) for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"returned": done.returncode, "notebooks": len(names), "summary": lines[-1], "failed": failed}


def lessons_missed(found: dict) -> list[str]:
    """The cells whose outputs are not the committed ones."""
    return (found["failed"] or [found["summary"]]) if found.get("returned") else []
