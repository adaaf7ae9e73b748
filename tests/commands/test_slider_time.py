"""benchmarks/slider_time.py moves every slider of a lesson and says how long the figure takes to follow."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "slider_time.py"
LESSON = """
import time
from zerolab.course import choice, explore, number, slider

def drawing(figure, rows, size=None, rate=None):
    end = time.process_time() + (0.3 if rows == 3 else 0)
    while time.process_time() < end:
        pass
    figure.subplots()
    return "Empty axes."

explore(drawing, rows=slider(1, 3, 2))
sizes = choice([("small", 1), ("LARGE", 2)], 1)
explore(drawing, rows=slider(1, 2, 1), size=sizes, rate=number(1, 100, 5))
"""


@pytest.mark.long("a test of a program that is run by hand")
def test_every_slider_is_moved_from_end_to_end_and_the_slowest_move_is_found(tmp_path: Path):
    with_sliders, without = tmp_path / "with.ipynb", tmp_path / "without.ipynb"
    for path, source in ((with_sliders, LESSON), (without, "1 + 1")):
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
        nbformat.write(book, path)
    command = [sys.executable, str(SCRIPT), str(with_sliders), str(without), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out/slider_time.txt").read_text()
    assert text == done.stdout
    one, many = (line.split()[-4:] for line in text.splitlines()[3:])
    assert (one[0], many[0]) == ("4", "13")  # 1 2 3 2; then 2 1, LARGE small, and eight rates and 5
    assert float(one[2]) >= 300 > float(one[1]), "one move of four is to three rows"
    assert float(many[2]) < 300
    assert float(many[3]) == pytest.approx(1, abs=0.9), "it draws empty axes, too"
