"""How far a process' resident memory rises while something runs."""

import ctypes
from pathlib import Path


def status(field: str) -> int:
    """Bytes of this process: "VmRSS" is its resident memory now, and "VmHWM" the most it was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def growth(act) -> int:
    """By how many bytes this process' memory rose above what it was, at the most, while ``act`` ran."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    act()
    return status("VmHWM") - before


def give_memory_back_when_freed() -> None:
    """Have malloc keep nothing of what is freed: memory used again would not be seen to grow."""
    map_threshold = -3
    assert ctypes.CDLL(None).mallopt(map_threshold, 2**16) == 1
