"""Measure on this machine's GPUs: python tests/gpu/report.py --out benchmarks/results

It runs every part of parts.py in a process of its own, with a time limit of its own, so that one that hangs
costs itself alone. It writes gpu.json, and a page of Markdown, with the machine, the versions and the date.
On a machine without a GPU the parts run on the CPU, and the files are called cpu-trial: they show that the
parts run, and nothing of a GPU.
"""

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2])]

from parts import PARTS  # noqa: E402  beside this file

from zerolab.launcher.gpus import visible_gpus  # noqa: E402


def run_part(name: str) -> dict:
    """One part in a process of its own: its result, or why there is none."""
    began, limit = time.monotonic(), PARTS[name][1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        process = subprocess.Popen(
            [sys.executable, __file__, "--part", name, "--out", str(file)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said = process.communicate()[0] + f"\nended after {limit} seconds"
        found = {"result": json.loads(file.read_text())} if file.exists() else {"error": said[-4000:]}
    return found | {"seconds": round(time.monotonic() - began, 1)}


def page(report: dict) -> str:
    """The report to be read."""
    lines = [f"# Measured on a {report['device']}, {report['date']}", ""]
    if report["device"] == "CPU":
        lines += ["A trial of the parts without a GPU. Nothing here says anything about GPUs.", ""]
    for name, part in report["parts"].items():
        title = PARTS[name][0].__doc__.strip().splitlines()[0]
        lines += [f"## {name}", "", f"{title} ({part['seconds']} s)", ""]
        lines += ["```json", json.dumps(part.get("result", part.get("error")), indent=1), "```", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="report.py", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder for the report")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default all")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        args.out.write_text(json.dumps(PARTS[args.part][0]()))
        return 0
    device = "GPU" if visible_gpus() else "CPU"
    report = {"device": device, "date": datetime.date.today().isoformat(), "parts": {}}
    name = "gpu" if device == "GPU" else "cpu-trial"
    args.out.mkdir(parents=True, exist_ok=True)
    for part in args.parts:
        report["parts"][part] = run_part(part)
        print(part, "failed" if "error" in report["parts"][part] else "done", flush=True)
        # Written after each part, so that a run that is broken off keeps what it had.
        (args.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
        (args.out / f"{name}.md").write_text(page(report))
    return int(any("error" in part for part in report["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
