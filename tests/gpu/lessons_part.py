"""The notebooks, run again on this machine and compared with their committed outputs by nbval."""

import importlib.util
import subprocess
import sys

from support import ROOT

from zerolab.launcher.gpus import visible_gpus


def lessons() -> dict:
    """The notebooks under nbval: all of them on a GPU, the first one without."""
    needed = [name for name in ("nbval", "ipykernel", "matplotlib") if importlib.util.find_spec(name) is None]
    if needed:
        return {"skipped": f"not installed: {', '.join(needed)}"}
    names = sorted((ROOT / "notebooks").glob("*.ipynb"))
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--nbval", "--nbval-sanitize-with",
        str(ROOT / "tests" / "nbval_sanitize.cfg"), *map(str, names if visible_gpus() else names[:1]),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return {"returned": done.returncode, "said": done.stdout[-2000:]}


def lessons_missed(found: dict) -> list[str]:
    return [found["said"]] if found.get("returned") else []
