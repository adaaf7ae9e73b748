"""The lessons of the course, found by looking into their folders, and what a test needs of one."""

import ast
import importlib
import re
import sys
from collections.abc import Callable
from functools import cache
from xml.etree import ElementTree

import cloudpickle
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from support import ROOT
from zerolab.course.exercise import solution_text
from zerolab.course.look import PAPER, contrast, figure, paint

ROOMS, SOURCES = ROOT / "zerolab/course/lessons", ROOT / "notebooks/source"
NAMES = sorted(room.parent.name for room in ROOMS.glob("*/__init__.py"))
SVG = "{http://www.w3.org/2000/svg}"


@cache
def source(name: str) -> str:
    """The script of the lesson that a notebook is built from."""
    (path,) = SOURCES.glob(f"[0-9][0-9]_{name}.py")
    return path.read_text("utf-8")


def code_cells(name: str) -> list[str]:
    cells = re.split(r"^# %%(.*)\n", source(name), flags=re.MULTILINE)[1:]
    return [code for marks, code in zip(cells[::2], cells[1::2], strict=True) if "[markdown]" not in marks]


def exercise_cells(name: str) -> list[str]:
    return [
        code for code in code_cells(name) if re.match(r"# (Exercise|Second exercise|Third exercise)\n", code)
    ]


def exercise(name: str, place: int = 0) -> tuple[str, str, str]:
    """The stub of an exercise of the lesson, the call of its check, and the solution on request."""
    cell = exercise_cells(name)[place]
    stub, _, call = cell.strip().rpartition("\n")
    check = getattr(importlib.import_module(f"zerolab.course.lessons.{name}"), call.partition("(")[0])
    return stub, call, solution_text(check.source)


EXERCISES = [(name, place) for name in NAMES for place in range(len(exercise_cells(name)))]
"""Every exercise: its lesson, and which of the lesson's it is."""


def notebook_names(name: str) -> dict:
    """What the first code cell of the lesson defines, as a notebook's own names."""
    names = {"__name__": "__main__"}
    exec(code_cells(name)[0], names)
    return names


def solutions_travel_by_value(module: str) -> None:
    """A reader's function travels by value from a notebook's cells; so do those of a test module."""
    cloudpickle.register_pickle_by_value(sys.modules[module])


def drawing(name: str, function: str) -> Callable[..., str]:
    """A drawing that a lesson's own cells define, with the other functions and constants of those cells."""
    return defined(name)[function]


@cache
def defined(name: str) -> dict:
    """All functions and constants that the cells of a lesson define, without what they run."""
    names = notebook_names(name)
    for code in code_cells(name)[1:]:
        own = [node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef) or _constant(node)]
        exec(compile(ast.Module(own, []), name, "exec"), names)
    return names


def _constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").isupper()


def spoken(draw: Callable[..., str], height: float = 3.4, **values) -> str:
    """The alt text of a drawing, after a look at it: sound SVG, its words on the page and legible."""
    return spoken_on(figure(height), draw, values)


def spoken_on(canvas: Figure, draw: Callable[..., str], values: dict) -> str:
    """The same on a figure that may have been drawn on before."""
    drawn, alt = paint(canvas, draw, values)
    root = ElementTree.fromstring(drawn)  # well-formed, whatever the words
    assert root.get("aria-label") == alt and not re.search(r'"-?(nan|inf)', drawn)
    words = {span.text for span in root.iter() if span.text}
    patches = [(patch, patch.get_window_extent()) for axes in canvas.axes for patch in axes.patches]
    for text in canvas.findobj(Text):
        if text.get_visible() and text.get_text().split("\n")[0] in words:
            look_at(text, canvas, patches)
    return alt


def look_at(text: Text, canvas: Figure, patches: list[tuple[Patch, Bbox]]) -> None:
    """A text is within the figure, and its contrast with the patch below it is 4.5 at least."""
    box = text.get_window_extent()
    assert canvas.bbox.padded(2).containsx(box.x0) and canvas.bbox.padded(2).containsx(box.x1), text
    assert canvas.bbox.padded(2).containsy(box.y0) and canvas.bbox.padded(2).containsy(box.y1), text
    middle = ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)
    below = [patch for patch, extent in patches if extent.contains(*middle)]
    filled = [
        to_hex(patch.get_facecolor()) for patch in below if patch.get_fill() and patch.get_facecolor()[3]
    ]
    paper = PAPER if text.get_bbox_patch() or not filled else filled[-1]
    assert contrast(to_hex(text.get_color()), paper) >= 4.5, (text, paper)
