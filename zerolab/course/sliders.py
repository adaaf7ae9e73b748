"""Show sliders above a figure: a plain image of the default state, redrawn when a slider moves.

A slider whose places are not its values stands beside a field of the browser. The field shows the value and
accepts one, and screen readers read it.
"""

import gc
import math
import sys
from collections.abc import Callable, Sequence

import ipywidgets
from IPython.display import DisplayHandle, display

from zerolab.course.look import Draw, bundle, figure, image_html, keep_layout, paint

Screen = Callable[[str, str], None]


LOG_STEP = 0.05
"""How far apart the places of a logarithmic slider are, in powers of ten."""


def slider(low: int, high: int, value: int, play: bool = False) -> ipywidgets.IntSlider:
    """A slider over the whole numbers from low to high, with a button that goes through them if `play`."""
    control = ipywidgets.IntSlider(value=value, min=low, max=high)
    if play:
        control.beside = ipywidgets.Play(value=value, min=low, max=high, interval=900)
        for trait in ("max", "value"):
            ipywidgets.link((control, trait), (control.beside, trait))
    return control


def choice(options: Sequence, value) -> ipywidgets.Dropdown:
    """Return a list of a few values in order, such as 1, 2, 4, 8, and a slider over them.

    Each may be a (label, value) pair.
    """
    control = ipywidgets.Dropdown(options=list(options), value=value)
    control.beside = ipywidgets.SelectionSlider(options=list(options), value=value, readout=False)
    ipywidgets.link((control, "value"), (control.beside, "value"))
    return control


def number(low: float, high: float, value: float) -> ipywidgets.BoundedFloatText:
    """Return a field for any number from low to high, and a logarithmic slider.

    A slider has places, and a browser moves its handle to the nearest one. So the slider sets the field only
    where it has come to another place than the field's number.
    """
    place_of = lambda number: round(math.log10(number / low) / LOG_STEP)
    at = lambda place: min(low * 10 ** (LOG_STEP * place), high)
    control = ipywidgets.BoundedFloatText(value=value, min=low, max=high)
    ends = {"min": math.log10(low), "max": math.log10(high)}
    control.beside = ipywidgets.FloatLogSlider(
        value=at(place_of(value)), step=LOG_STEP, readout=False, **ends
    )

    def take_from_slider(change: dict) -> None:
        if place_of(change["new"]) != place_of(control.value):
            control.value = float(f"{change['new']:.3g}")

    def show_on_slider(change: dict) -> None:
        control.beside.value = at(place_of(change["new"]))

    control.beside.observe(take_from_slider, names="value")
    control.observe(show_on_slider, names="value")
    return control


def explore(draw: Draw, *, height: float = 2.8, **controls: ipywidgets.Widget) -> None:
    """Show `draw` with the controls' default values, and again whenever the reader moves a control.

    `draw(figure, **values)` draws on an empty figure and returns its alt text. The picture is an ordinary
    output of the cell, so a page without a kernel shows the default state. The controls are one widget above
    it, each labelled with its keyword.

    Raises: ValueError for a missing alt text.
    """
    values = ", ".join(f"{_words(name)} = {_shown(control)}" for name, control in controls.items())
    panel = ipywidgets.VBox([_row(_words(name), control) for name, control in controls.items()])
    screen = (_in_a_widget if "google.colab" in sys.modules else _as_an_output)(panel, values)
    canvas = figure(height)

    def redraw(_change=None) -> None:
        screen(*paint(canvas, draw, {name: control.value for name, control in controls.items()}))

    redraw()
    keep_layout(canvas)
    gc.collect()  # now, and not while a slider moves: it takes several times as long as a redraw
    for control in controls.values():
        control.observe(redraw, names="value")


def _shown(control: ipywidgets.Widget):
    """The value of a control as the reader sees it: of an option that is a (label, value) pair the label."""
    if not isinstance(control, ipywidgets.Dropdown):
        return control.value
    option = control.options[control.index]
    return option[0] if isinstance(option, tuple) else option


def _words(name: str) -> str:
    return name.replace("_", " ")


def _row(name: str, control: ipywidgets.Widget) -> ipywidgets.Box:
    """Return a control with its label, and what is beside it; on a narrow page that moves below it."""
    is_slider = isinstance(control, ipywidgets.IntSlider)
    control.description, control.style.description_width = name, "11em"
    control.layout.width = "min(34em, 95%)" if is_slider else "min(19em, 95%)"
    row = [control, control.beside] if hasattr(control, "beside") else [control]
    return ipywidgets.Box(row, layout={"flex_flow": "row wrap"})


def _as_an_output(panel: ipywidgets.VBox, values: str) -> Screen:
    """Show the picture as an output of the cell, and replace it through its display handle."""
    _display_widget(panel, values)
    handles: list[DisplayHandle] = []

    def screen(drawing: str, alt: str) -> None:
        if handles:
            handles[0].update(bundle(drawing, alt), raw=True)
        else:
            handles.append(display(bundle(drawing, alt), raw=True, display_id=True))

    return screen


def _in_a_widget(panel: ipywidgets.VBox, values: str) -> Screen:
    """Show the picture in a widget of its own, for Colab, where only widgets follow a widget's callback."""
    picture = ipywidgets.HTML()
    _display_widget(ipywidgets.VBox([panel, picture]), values)

    def screen(drawing: str, alt: str) -> None:
        picture.value = image_html(drawing, alt)

    return screen


def _display_widget(widget: ipywidgets.Widget, values: str) -> None:
    """Display a widget with a text of our own, because ipywidgets 7 and 8 print different ones."""
    text = f"Sliders, live in a running notebook; shown at {values}."
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    display({"application/vnd.jupyter.widget-view+json": view, "text/plain": text}, raw=True)
