"""Describe the machine that a benchmark ran on."""

import os
import platform
from pathlib import Path

import torch

from zerolab.launcher.launcher import core_count, memory_bytes


def describe() -> dict[str, str | int | float]:
    """What a reader needs to judge the numbers: processor, cores, memory, versions, and the load before."""
    found: dict[str, str | int | float] = {
        "processor": processor(),
        "cores": core_count(),
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": round(os.getloadavg()[0], 2),
    }
    if torch.cuda.is_available():
        found["gpus"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return found


def processor() -> str:
    """Return the processor's name, from Linux's own list where there is one."""
    listed = Path("/proc/cpuinfo")
    if listed.exists():
        for line in listed.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def in_words(machine: dict) -> str:
    """Return one line for the head of a table."""
    gpus = f", {machine['gpus']}" if "gpus" in machine else ""
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_bytes'] / 1e9:.0f} GB{gpus}; "
        f"torch {machine['torch']}, Python {machine['python']}, {machine['system']}; "
        f"load {machine['load_before']} before"
    )


def publish(text: str, folder: Path | None, name: str) -> None:
    """Print a benchmark's tables, and write them into a file of the folder, if there is one. It is made."""
    print(text, end="")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
