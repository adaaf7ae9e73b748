"""How long a figure takes to follow a slider: python benchmarks/slider_time.py --out FOLDER

Each lesson with sliders is run from its first to its last cell. Then every slider is moved through its
places, from end to end, while the other sliders of its figure stay where the lesson puts them. The table has
the processor time of the kernel from a new value to the new picture: the median of all moves of a figure, and
the longest one. All moves are made three times and the shortest time of a move counts, because other programs
of the machine make the others longer. (The longest time is the longest of all.) After the moves of a slider a
figure of empty axes is drawn as often with the same tools. The last column has the moves' time over that.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import ipywidgets
import nbformat
import numpy as np
from lesson_memory import lessons, run

import zerolab.course
from zerolab.bench.machine import describe, in_words, publish
from zerolab.course.look import figure, keep_layout, paint
from zerolab.course.sliders import explore

MOVES = 8
"""Of one slider, at most."""
ROUNDS = 3
"""How often all moves are made."""


class Watched:
    """The figures with sliders that a lesson has shown, and how to move their sliders."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, dict[str, ipywidgets.Widget]]] = []

    def explore(self, draw: Callable[..., str], **options: Any) -> None:
        """Show a figure as the package does, and keep its sliders."""
        explore(draw, **options)
        controls = {name: each for name, each in options.items() if isinstance(each, ipywidgets.Widget)}
        name = getattr(getattr(draw, "func", draw), "__name__", "draw")
        self.shown.append((name, controls))

    def print_seconds(self) -> None:
        """Move every slider, and print as a line of JSON what the moves and figures of empty axes took."""
        print(json.dumps([(name, _rounds(controls)) for name, controls in self.shown]))


def _rounds(controls: dict[str, ipywidgets.Widget]) -> list[list[tuple[float, float]]]:
    """What each move took, and the figure of empty axes after it, by round."""
    return [list(_moves(controls)) for _ in range(ROUNDS)]


def _moves(controls: dict[str, ipywidgets.Widget]) -> Iterator[tuple[float, float]]:
    redraw_empty_axes = _empty_axes()
    for control in controls.values():
        values = [value for value, _ in groupby([control.value, *_places(control), control.value])]
        moves = [_processor_seconds(partial(setattr, control, "value", value)) for value in values[1:]]
        yield from ((seconds, _processor_seconds(redraw_empty_axes)) for seconds in moves)


def _places(control: ipywidgets.Widget) -> list:
    """Some of a slider's values, from its first to its last one."""
    if isinstance(control, ipywidgets.Dropdown):
        values = [each[1] if isinstance(each, tuple) else each for each in control.options]
    elif isinstance(control, ipywidgets.IntSlider):
        values = list(range(control.min, control.max + 1))
    else:
        growth = control.max / control.min
        return [control.min * growth ** (move / (MOVES - 1)) for move in range(MOVES)]
    return [values[round(move * (len(values) - 1) / (MOVES - 1))] for move in range(MOVES)]


def _empty_axes() -> Callable[[], object]:
    def draw(canvas: Any) -> str:
        canvas.subplots()
        return "Axes with nothing in them."

    canvas = figure()
    paint(canvas, draw, {})
    keep_layout(canvas)
    return partial(paint, canvas, draw, {})


def _processor_seconds(act: Callable[[], object]) -> float:
    begin = time.process_time()
    act()
    return time.process_time() - begin


def watch() -> Watched:
    """Called in the kernel before a lesson's first cell: the lesson imports the watched ``explore``."""
    watched = Watched()
    zerolab.course.explore = watched.explore
    return watched


def measured(path: Path) -> list[tuple[str, list[list[tuple[float, float]]]]]:
    """Run one notebook, and return each figure's name with the seconds of its moves and of empty axes.

    Raises: nbclient's CellExecutionError for a cell that fails.
    """
    book = nbformat.read(path, as_version=4)
    here = str(Path(__file__).parent)
    first = f"import sys; sys.path.insert(0, {here!r}); import slider_time; watched = slider_time.watch()"
    book.cells.insert(0, nbformat.v4.new_code_cell(first))
    book.cells.append(nbformat.v4.new_code_cell("watched.print_seconds()"))
    run(book, path, OMP_NUM_THREADS="1")  # the time of all threads would count
    (printed,) = (each.text for each in book.cells[-1].outputs if each.get("name") == "stdout")
    return json.loads(printed)


def has_sliders(path: Path) -> bool:
    return "explore(" in path.read_text("utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    paths, out = lessons(parser)
    header = f"{'ms of processor time':45}{'moves':>7}{'median':>8}{'longest':>9}{'over empty axes':>17}"
    lines = [in_words(describe()), "", header]
    for path in filter(has_sliders, paths):
        for name, rounds in measured(path):
            lines.append(row(f"{path.stem} {name}", rounds))
            print(lines[-1], file=sys.stderr, flush=True)
    publish("\n".join(lines) + "\n", out, "slider_time.txt")


def row(name: str, rounds: list[list[tuple[float, float]]]) -> str:
    moves, empty_axes = np.min(rounds, axis=0).T
    median, longest = np.median(moves), np.max(rounds, axis=(0, 1))[0]
    over = median / np.median(empty_axes)
    return f"{name:45}{len(moves):7}{1e3 * median:8.0f}{1e3 * longest:9.0f}{over:17.1f}"


if __name__ == "__main__":
    main()
