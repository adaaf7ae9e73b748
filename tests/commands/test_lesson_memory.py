"""benchmarks/lesson_memory.py counts what a notebook and its processes hold, each page once."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "lesson_memory.py"
EMPTY = "pass"
HOLDS = """
import os, time
held = bytearray(os.urandom(1)) * 300_000_000
if not (child := os.fork()):
    of_the_child = bytearray(os.urandom(1)) * 200_000_000
    time.sleep(2)
    os._exit(0)
os.waitpid(child, 0)
"""


def notebook(path: Path, source: str) -> str:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source), nbformat.v4.new_code_cell("1")])
    nbformat.write(book, path)
    return str(path)


@pytest.mark.long("a test of a program that is run by hand")
def test_memory_of_a_kernel_and_of_its_processes_is_counted_and_shared_memory_once(tmp_path: Path):
    paths = [notebook(tmp_path / "empty.ipynb", EMPTY), notebook(tmp_path / "holds.ipynb", HOLDS)]
    command = [sys.executable, str(SCRIPT), *paths, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out/lesson_memory.txt").read_text()
    assert text == done.stdout
    rows = {name: float(gb) for name, gb, _ in (line.split() for line in text.splitlines()[3:])}
    assert rows["holds"] - rows["empty"] == pytest.approx(0.5, abs=0.06)
    assert rows["empty"] > 0.1, "the server of JupyterLab is counted too"
