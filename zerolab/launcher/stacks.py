"""Parse the stacks that faulthandler writes, and find which ranks wait in a collective."""

import linecache
import re
from typing import NamedTuple

from zerolab.launcher.failures import LaunchTimeout, name_ranks

WAITS = (".wait(", ".item(", "cuda.synchronize(")  # the last two wait for the GPU, and so for its messages

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        """The line's text; notebook cells are known to the launching process."""
        return linecache.getline(self.file, self.line).strip()


def parse(dump: str) -> list[list[Frame]]:
    """Return the stacks of the last dump in a file, one list per thread, innermost frame first."""
    threads: list[list[Frame]] = []
    for line in dump.splitlines():
        if match := _FRAME.match(line):
            threads[-1].append(Frame(match["file"], int(match["line"]), match["function"]))
        elif "(most recent call first)" in line:
            threads.append([])
    return threads


def complete(dump: str) -> bool:
    """Whether a dump has come to its end: the main thread's outermost frame, or "..." where it is cut."""
    return dump.endswith((" in <module>\n", "  ...\n"))


def main_thread(threads: list[list[Frame]]) -> list[Frame]:
    """Return the stack that runs the user's function, without the frames of the launcher beneath it."""
    for frames in threads:
        for depth, frame in enumerate(frames):
            if frame.function == "call" and frame.file.endswith("zerolab/launcher/rank.py"):
                return frames[:depth] or frames[: depth + 1]
    return threads[-1] if threads else []


def in_collective(threads: list[list[Frame]]) -> bool:
    """Whether a rank is inside torch.distributed, waits on a collective's work, or ran backward into one."""
    frames = main_thread(threads)
    if _waits(frames):
        return True
    in_backward = bool(frames) and frames[0].file.endswith("torch/autograd/graph.py")
    return in_backward and any(_waits(other) for other in threads)  # hooks run in the device's own thread


def _waits(frames: list[Frame]) -> bool:
    """Look at the frames down to the first that is not torch's: it called what the rank is now in.

    zerolab's collectives run on a thread of their own, whose future the rank waits for with a lock.
    """
    at_lock = bool(frames) and frames[0].file.endswith("/threading.py")
    for frame in frames:
        if "/torch/distributed/" in frame.file or "/zerolab/collectives/" in frame.file:
            return True
        if not any(part in frame.file for part in ("/torch/", "/threading.py", "/concurrent/futures/")):
            return not at_lock and any(call in frame.source for call in WAITS)
    return False


def render(frames: list[Frame]) -> str:
    """Return the stack as Python prints one: outermost first, with source."""
    lines = []
    for frame in reversed(frames):
        lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
        if frame.source:
            lines.append(f"    {frame.source}")
    return "\n".join(lines)


def timeout_error(seconds: float, stacks: dict[int, list[list[Frame]]], done: set[int]) -> LaunchTimeout:
    """The error at the deadline: the stacks of the ranks that wait for no other, then what the rest did."""
    waiting = {rank for rank, threads in stacks.items() if in_collective(threads)}
    culprits = sorted(stacks.keys() - waiting)
    if culprits:
        parts = [f"{name_ranks(culprits)} still ran code of its own after {seconds:g} s"]
    else:
        asked = "do all make the same calls, in one order?"
        parts = [f"after {seconds:g} s every rank that has not returned waits for another: {asked}"]
    for rank in culprits or sorted(waiting):
        stack = render(main_thread(stacks[rank])) or "  (none: the process does not answer)"
        parts.append(f"rank {rank}'s stack (most recent call last):\n{stack}")
    if culprits and waiting:
        parts.append(f"waiting for another rank: {name_ranks(waiting)}")
    if done:
        parts.append(f"returned: {name_ranks(done)}")
    places = {rank: main_thread(threads) for rank, threads in stacks.items()}
    return LaunchTimeout("\n\n".join(parts), tuple(culprits), places)
