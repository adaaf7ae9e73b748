"""The lessons of the course, found by looking into their folders, and what a test needs of one."""

import re
import sys
from functools import cache
from xml.etree import ElementTree

import cloudpickle

from support import ROOT
from zerolab.course.look import paint

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


def exercise(name: str) -> tuple[str, str, str]:
    """The stub of the lesson's exercise, the call of the check below it, and the solution folded away."""
    (cell,) = [code for code in code_cells(name) if code.startswith("# Exercise\n")]
    stub, _, call = cell.strip().rpartition("\n")
    (solution,) = re.findall(r"^# ```python\n(# (?:def|class) .*?)^# ```$", source(name), re.S | re.M)
    return stub, call, re.sub(r"^# ?", "", solution, flags=re.MULTILINE)


def notebook_names(name: str) -> dict:
    """What the first code cell of the lesson defines, as a notebook's own names."""
    names = {"__name__": "__main__"}
    exec(code_cells(name)[0], names)
    return names


def solutions_travel_by_value(module: str) -> None:
    """A reader's function travels by value from a notebook's cells; so do those of a test module."""
    cloudpickle.register_pickle_by_value(sys.modules[module])


def spoken(draw, **values) -> str:
    """The alt text of a drawing, after a look at it: sound SVG with every word and box on the page."""
    svg, alt = paint(draw, 3.4, values)
    root = ElementTree.fromstring(svg)  # well-formed, whatever the words
    assert root.get("aria-label") == alt
    assert not re.search(r'"-?(nan|inf)', svg)
    _, _, width, height = map(float, root.get("viewBox").split())
    for text in root.iter(f"{SVG}text"):
        x, y = map(float, re.match(r"translate\(([-\d.]+) ([-\d.]+)\)", text.get("transform")).groups())
        assert 0 <= x <= width and 0 <= y <= height, "".join(text.itertext())
    for box in list(root.iter(f"{SVG}rect"))[1:]:
        if box.get("width").endswith("%") or "patternUnits" in box.attrib or box.get("x") is None:
            continue
        left, wide = float(box.get("x")), float(box.get("width"))
        assert left >= -1 and left + wide <= width + 1
    return alt
