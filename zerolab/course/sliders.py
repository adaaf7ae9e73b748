"""Sliders above a figure: a plain image of the default state, redrawn in place when a slider moves."""

import sys
from collections.abc import Callable, Sequence

import ipywidgets
from IPython.display import DisplayHandle, display

from zerolab.course.look import Draw, bundle, image_html, paint

Screen = Callable[[str, str], None]


def slider(low: int, high: int, value: int) -> ipywidgets.IntSlider:
    """A slider over the whole numbers from low to high."""
    return ipywidgets.IntSlider(value=value, min=low, max=high)


def choice(options: Sequence, value) -> ipywidgets.SelectionSlider:
    """A slider over a few values in order, such as 1, 2, 4, 8; each may be a (label, value) pair."""
    return ipywidgets.SelectionSlider(options=list(options), value=value)


def explore(draw: Draw, *, height: float = 3.2, **controls: ipywidgets.Widget) -> None:
    """Show `draw` with the controls' default values, and again whenever the reader moves a control.

    The picture is an ordinary output of the cell, so a page without a kernel shows the default state. The
    controls are one widget above it, each labelled with its keyword.

    Raises: ValueError from `draw` for a missing alt text.
    """
    for name, control in controls.items():
        control.description = name.replace("_", " ")
        control.style.description_width = "9em"
        control.layout.width = "min(34em, 95%)"
    panel = ipywidgets.VBox(list(controls.values()))
    screen = _in_a_widget(panel) if "google.colab" in sys.modules else _as_an_output(panel)

    def redraw(_change=None) -> None:
        screen(*paint(draw, height, {name: control.value for name, control in controls.items()}))

    redraw()
    for control in controls.values():
        control.observe(redraw, names="value")


def _as_an_output(panel: ipywidgets.VBox) -> Screen:
    """Show the picture as an output of the cell, and replace it through its display handle."""
    _display_widget(panel, panel)
    handles: list[DisplayHandle] = []

    def screen(svg: str, alt: str) -> None:
        if handles:
            handles[0].update(bundle(svg, alt), raw=True)
        else:
            handles.append(display(bundle(svg, alt), raw=True, display_id=True))

    return screen


def _in_a_widget(panel: ipywidgets.VBox) -> Screen:
    """Show the picture in a widget of its own, for Colab, where only widgets follow a widget's callback."""
    picture = ipywidgets.HTML()
    _display_widget(ipywidgets.VBox([panel, picture]), panel)

    def screen(svg: str, alt: str) -> None:
        picture.value = image_html(svg, alt)

    return screen


def _display_widget(widget: ipywidgets.Widget, panel: ipywidgets.VBox) -> None:
    """Display a widget with a text of our own, because ipywidgets 7 and 8 print different ones."""
    values = (f"{each.description} = {getattr(each, 'label', each.value)}" for each in panel.children)
    text = f"Sliders, live in a running notebook; shown at {', '.join(values)}."
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    display({"application/vnd.jupyter.widget-view+json": view, "text/plain": text}, raw=True)
