"""Measure on this machine's GPUs: python tests/gpu/report.py --out benchmarks/results

It runs every part of parts.py in a process of its own, with a time limit of its own, so that one that hangs
costs itself alone: first those that measure times, one after the other, then the rest, four beside each
other; less than eight minutes in all. It writes gpu.json, and a page of Markdown, with the machine, the
versions and the date, and says which promise or target was missed. On a machine without a GPU the parts run
on the CPU, and the files are called cpu-trial: they show that the parts run, and nothing of a GPU.
"""

import argparse
import datetime
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from common import run_command  # noqa: E402  beside this file
from parts import PARTS  # noqa: E402

from zerolab.launcher.gpus import visible_gpus  # noqa: E402

TOGETHER = 4
"""How many parts run beside each other: most of their time is that of starting processes on the CPU."""


def run_part(name: str) -> dict:
    """One part in a process of its own: its result and what it missed, or why there is none."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        part = [sys.executable, __file__, "--part", name, "--out", str(file)]
        one_thread = {"OMP_NUM_THREADS": "1"}  # threads of many ranks would wait for each other
        _, said = run_command(part, PARTS[name].seconds, one_thread)
        if not file.exists():
            found = {"error": said[-4000:]}
        else:
            result = json.loads(file.read_text())
            found = {"result": result, "missed": PARTS[name].missed(result)}
    return found | {"seconds": round(time.monotonic() - began, 1)}


def measure(names: list[str], folder: Path) -> dict:
    """Run these parts, and write the report after each, so that a run broken off keeps what it had."""
    device = "GPU" if visible_gpus() else "CPU"
    report: dict = {"device": device, "date": datetime.date.today().isoformat(), "parts": {}}
    name = "gpu" if device == "GPU" else "cpu-trial"
    folder.mkdir(parents=True, exist_ok=True)
    for part, found in run_all(names):
        found_by_part = report["parts"] | {part: found}
        report["parts"] = {each: found_by_part[each] for each in PARTS if each in found_by_part}
        print(part, verdict(found), flush=True)
        (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
        (folder / f"{name}.md").write_text(page(report))
    return report


def run_all(names: list[str]) -> Iterator[tuple[str, dict]]:
    """Run these parts, the timed ones alone; each with what came of it, as soon as it ends."""
    timed = [name for name in names if PARTS[name].is_timed]
    yield from ((name, run_part(name)) for name in timed)
    with ThreadPoolExecutor(TOGETHER) as pool:
        started = {pool.submit(run_part, name): name for name in PARTS if name in {*names} - {*timed}}
        yield from ((started[each], each.result()) for each in as_completed(started))


def verdict(part: dict) -> str:
    """In a few words: what came of a part."""
    if "error" in part:
        return f"failed after {part['seconds']} s"
    missed = len(part["missed"])
    return f"done in {part['seconds']} s" + (f", {missed} missed" if missed else "")


def page(report: dict) -> str:
    """The report to be read."""
    lines = [f"# Measured on a {report['device']}, {report['date']}", ""]
    if report["device"] == "CPU":
        lines += ["A trial of the parts without a GPU. Nothing here says anything about GPUs.", ""]
    lines += [*(f"- {each}" for each in report.get("notes", ())), ""]
    for name, part in report["parts"].items():
        title = PARTS[name].measure.__doc__.strip().splitlines()[0]
        lines += [f"## {name}", "", f"{title} {verdict(part).capitalize()}.", ""]
        lines += [*(f"- Missed: {each}" for each in part.get("missed", ())), ""]
        found = part.get("result", part.get("error"))
        lines += [table(found) or f"```json\n{json.dumps(found, indent=1)}\n```", ""]
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def table(found: object) -> str | None:
    """Rows with the same columns as a table of Markdown; None where it is not that."""
    if not isinstance(found, dict | list):
        return None
    rows = list(found.items() if isinstance(found, dict) else enumerate(found))
    if not rows or not all(isinstance(row, dict) for _, row in rows):
        return None
    columns = list(dict.fromkeys(name for _, row in rows for name in row))
    head = ["| |", *(f" {name} |" for name in columns)], ["|---|", *("---|" for _ in columns)]
    body = ([f"| {label} |", *(f" {shown(row.get(name))} |" for name in columns)] for label, row in rows)
    return "\n".join("".join(cells) for cells in (*head, *body))


def shown(value: object) -> str:
    if isinstance(value, list):
        return "<br>".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return "<br>".join(f"{name}: {shown(each)}" for name, each in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(prog="report.py", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder for the report")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default all")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        args.out.write_text(json.dumps(PARTS[args.part].measure()))
        return 0
    report = measure(args.parts, args.out)
    return int(any("error" in part or part["missed"] for part in report["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
