"""The explorers of a lesson, with their sliders moved."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import ipywidgets

from support.lessons import code_cells, defined, spoken_on
from zerolab.course.look import figure, keep_layout, paint


class Explorer(NamedTuple):
    """One call of ``explore`` in a lesson: what it draws, and its sliders."""

    draw: Callable[..., str]
    height: float
    controls: dict[str, ipywidgets.Widget]

    def defaults(self) -> dict[str, Any]:
        return {name: control.value for name, control in self.controls.items()}

    def moved(self) -> Iterator[dict[str, Any]]:
        """Each slider at its first and last place, with the others where they are in the lesson."""
        for name, control in self.controls.items():
            for value in ends(control):
                yield self.defaults() | {name: value}


def ends(control: ipywidgets.Widget) -> tuple[Any, Any]:
    if isinstance(control, ipywidgets.Dropdown):
        values = [each[1] if isinstance(each, tuple) else each for each in control.options]
        return values[0], values[-1]
    return control.min, control.max


def explorers(lesson: str) -> list[Explorer]:
    """The explorers of a lesson, but those that draw what cells of the lesson measure when it is run."""
    found = []

    def record(draw: Callable[..., str], *, height: float = 2.8, **controls: ipywidgets.Widget) -> None:
        explorer = Explorer(draw, height, controls)
        draw(figure(height), **explorer.defaults())
        found.append(explorer)

    for code in code_cells(lesson):
        if re.search(r"^explore\(", code, re.M):
            with suppress(NameError):
                exec(code, defined(lesson) | {"explore": record})
    return found


def move_sliders(explorer: Explorer) -> None:
    """The axes stay where they were, and all words are on the page and legible."""
    canvas = figure(explorer.height)
    paint(canvas, explorer.draw, explorer.defaults())
    places = [axes.get_position().bounds for axes in canvas.axes]
    keep_layout(canvas)
    for values in explorer.moved():
        spoken_on(canvas, explorer.draw, values)
        assert [axes.get_position().bounds for axes in canvas.axes] == places, values
