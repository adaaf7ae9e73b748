"""Sliders above a figure: a plain image of the default state, redrawn in place when a slider moves."""

import sys
from collections.abc import Sequence

import ipywidgets
from IPython.display import display

from zerolab.course.look import Draw, bundle, image_html, paint


def slider(low: int, high: int, value: int) -> ipywidgets.IntSlider:
    """Whole numbers from low to high."""
    return ipywidgets.IntSlider(value=value, min=low, max=high)


def choice(options: Sequence, value) -> ipywidgets.SelectionSlider:
    """One of a few values in order, such as the GPU counts 1, 2, 4, 8; each may be a (label, value) pair."""
    return ipywidgets.SelectionSlider(options=list(options), value=value)


def explore(draw: Draw, *, height: float = 3.2, **controls: ipywidgets.Widget) -> None:
    """Show `draw` at the controls' default values, and again whenever the reader moves one.

    The picture is an ordinary output of the cell, redrawn through its display handle, so a page without a
    kernel shows the default state; the controls are one widget above it. Each control is labelled with its
    keyword.

    Raises: ValueError from `draw` for a missing alt text.
    """
    for name, control in controls.items():
        control.description = name.replace("_", " ")
        control.style.description_width = "9em"
        control.layout.width = "min(34em, 95%)"
    panel = ipywidgets.VBox(list(controls.values()))
    screen = _WidgetScreen(panel) if "google.colab" in sys.modules else _OutputScreen(panel)

    def redraw(_change=None) -> None:
        screen.put(*paint(draw, height, {name: control.value for name, control in controls.items()}))

    redraw()
    for control in controls.values():
        control.observe(redraw, names="value")


def _display_widget(widget: ipywidgets.Widget, text: str) -> None:
    """Display a widget with a text of our own: the two ipywidgets generations print different ones."""
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    display({"application/vnd.jupyter.widget-view+json": view, "text/plain": text}, raw=True)


def _caption(panel: ipywidgets.VBox) -> str:
    defaults = ", ".join(f"{control.description} = {_label(control)}" for control in panel.children)
    return f"Sliders, live in a running notebook; shown at {defaults}."


def _label(control: ipywidgets.Widget) -> str:
    if not isinstance(control, ipywidgets.SelectionSlider):
        return str(control.value)
    option = control.options[control.index]
    return str(option[0] if isinstance(option, tuple) else option)


class _OutputScreen:
    """The picture as an output of the cell, replaced through its display handle."""

    def __init__(self, panel: ipywidgets.VBox):
        self.panel, self.handle = panel, None

    def put(self, svg: str, alt: str) -> None:
        if self.handle is None:
            _display_widget(self.panel, _caption(self.panel))
            self.handle = display(bundle(svg, alt), raw=True, display_id=True)
        else:
            self.handle.update(bundle(svg, alt), raw=True)


class _WidgetScreen:
    """The picture inside the widget, for Colab, where only widgets surely follow a widget's callback."""

    def __init__(self, panel: ipywidgets.VBox):
        self.panel, self.picture = panel, None

    def put(self, svg: str, alt: str) -> None:
        if self.picture is None:
            self.picture = ipywidgets.HTML()
            _display_widget(ipywidgets.VBox([self.panel, self.picture]), _caption(self.panel))
        self.picture.value = image_html(svg, alt)
