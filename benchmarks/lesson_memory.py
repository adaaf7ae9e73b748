"""How much memory a lesson needs on Binder: python benchmarks/lesson_memory.py --out FOLDER

Each notebook is run from its first to its last cell, while a JupyterLab server waits beside it. The table has
the most memory that the server, the notebook's kernel and all processes of that kernel held together. A page
that several processes share is counted once (Linux' proportional set size).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import nbclient
import nbformat
import psutil

from zerolab.bench.machine import describe, in_words, publish
from zerolab.flags import folder

ROOT = Path(__file__).resolve().parents[1]
SECONDS_BETWEEN_SAMPLES = 0.1
LIMIT_BYTES = 2**31
"""What Binder gives: a container that needs more is ended."""


def peak_bytes(act: Callable[[], object]) -> int:
    """The most memory that the descendants of this process hold together while ``act`` runs."""
    ended = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        sampling = threads.submit(_sample_until, ended)
        try:
            act()
        finally:
            ended.set()
    return sampling.result()


def _sample_until(ended: threading.Event) -> int:
    peak = 0
    while not ended.wait(SECONDS_BETWEEN_SAMPLES):
        peak = max(peak, sum(map(_held_bytes, psutil.Process().children(recursive=True))))
    return peak


def _held_bytes(process: psutil.Process) -> int:
    """The process' own memory and its part of what it shares; 0 for one that has ended."""
    try:
        return process.memory_full_info().pss
    except psutil.NoSuchProcess:
        return 0


@contextmanager
def jupyterlab() -> Iterator[None]:
    """A JupyterLab server that has answered once, as it would before a reader opens a lesson."""
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
        with subprocess.Popen(
            [*command, "--port=0", f"--notebook-dir={home}"],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"JUPYTER_RUNTIME_DIR": home},
        ) as server:
            try:
                wait_for_line(server, "is running at")
                yield
            finally:
                server.terminate()


def wait_for_line(server: subprocess.Popen, words: str) -> None:
    """Read what the server writes until a line has these words; a thread reads what it writes afterwards.

    Raises: RuntimeError with the last lines of a server that ends before.
    """
    lines = []
    for line in server.stderr:
        lines.append(line)
        if words in line:
            threading.Thread(target=server.stderr.read, daemon=True).start()
            return
    raise RuntimeError("JupyterLab did not start:\n" + "".join(lines[-5:]))


def lessons(parser: argparse.ArgumentParser) -> tuple[list[Path], Path | None]:
    """The notebooks that the command line names, all lessons by default, and the folder for the result."""
    parser.add_argument("notebooks", nargs="*", type=Path, help="all lessons by default")
    parser.add_argument("--out", type=folder, help="a folder for the table, made if it is not there")
    arguments = parser.parse_args()
    paths = arguments.notebooks or sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    return [path.resolve() for path in paths], arguments.out


def run(book: nbformat.NotebookNode, path: Path, **environment: str) -> None:
    """Run a notebook as if it were at a path; the outputs go into it.

    Raises: nbclient's CellExecutionError for a cell that fails.
    """
    off = dict.fromkeys(("ZEROLAB_PROGRESS", "ZEROLAB_BACKEND_LINE"), "off")
    client = nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": path.parent}})
    client.execute(env=os.environ | off | environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    paths, out = lessons(parser)
    lines = [in_words(describe()), "", f"{'':22}{'GB at most':>10}{'of 2 GiB':>10}"]
    with jupyterlab():
        for path in paths:
            found = peak_bytes(partial(run, nbformat.read(path, as_version=4), path))
            lines.append(f"{path.stem:22}{found / 1e9:10.2f}{found / LIMIT_BYTES:10.0%}")
            print(lines[-1], file=sys.stderr, flush=True)
    publish("\n".join(lines) + "\n", out, "lesson_memory.txt")


if __name__ == "__main__":
    main()
