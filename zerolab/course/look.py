"""Style every figure and display it: matplotlib's settings, colours, alt text."""

import base64
import gc
import html
import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import matplotlib
from IPython.display import display
from matplotlib import rcsetup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import LayoutEngine, TightLayoutEngine
from matplotlib.patches import Rectangle

# The paper is part of the picture, so words have the same contrast on a light page and on a dark one.
PAPER, INK, QUIET, PALE = "#F7F7F7", "#222222", "#666666", "#C8C8C8"
# Colour-blind readers can tell Okabe and Ito's colours apart. They mean these categories and nothing else.
COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer state": "#009E73",
    "activations": "#CC79A7",
}
_RANK_COLOURS = ("#3B2A8C", "#C93C34", "#DDCC66", "#7FCDEE", "#662244", "#8E8E8E", "#CCCCAA", "#8B5E2B")
# Lines that are no category: each has a mark of its own too, so that colour is not needed to tell them apart.
_SERIES = rcsetup.cycler(color=[INK, "#7A3E9D", "#A8323E", "#5B6770"], marker=["x", "o", "s", "^"])
# 10 points are 16 pixels on a wide page and 9 on a phone, whose page scrolls sideways if it is narrower.
WIDTH_INCHES, WIDTH_PIXELS, NARROWEST_PIXELS = 5.2, 600, 330

matplotlib.rcParams.update(
    {
        "svg.fonttype": "none",  # words stay words: small, sharp, and found by a search
        "svg.hashsalt": "zerolab",  # the same drawing is the same file
        "figure.facecolor": PAPER,
        "axes.facecolor": "none",
        "axes.edgecolor": QUIET,
        "axes.formatter.min_exponent": 6,  # 100 and not 10², and 10⁶ and not 1e+06
        "axes.prop_cycle": _SERIES,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 10,
        "axes.titley": 1.0,  # with None, matplotlib measures the words of both axes to place it
        "axes.titleweight": "bold",
        "font.size": 10,
        "legend.fontsize": 9,
        "legend.frameon": False,
        "legend.handlelength": 1.4,
        "lines.markersize": 4,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    }
)

Draw = Callable[..., str]


def rank_colour(rank: int) -> str:
    """The colour of a rank in every figure; they repeat after eight, so figures write the number too."""
    return _RANK_COLOURS[rank % len(_RANK_COLOURS)]


def ink_on(colour: str) -> str:
    """Black or white, whichever has the higher contrast on a colour."""
    return max((INK, "#FFFFFF"), key=lambda ink: contrast(ink, colour))


def contrast(one: str, other: str) -> float:
    """Return the ratio of two colours' luminance, from 1 to 21; words need 4.5 (WCAG 2.1)."""
    dark, bright = sorted(map(_luminance, (one, other)))
    return (bright + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def by_category(states, unit_bytes: float = 1e9) -> dict[str, float]:
    """The model states by category, in GB or another unit, of anything with ``params_bytes`` and so on."""
    sizes = (states.params_bytes, states.grads_bytes, states.optimizer_bytes)
    return {name: size / unit_bytes for name, size in zip(COLOURS, sizes, strict=False)}


def magnify(axes: Axes) -> None:
    """Draw rows of bars that are too short to see once more at the right, enlarged by the factor in words."""
    widest = axes.get_xlim()[1]
    bars = sorted((bar for bar in axes.patches if isinstance(bar, Rectangle)), key=Rectangle.get_y)
    for _, row in groupby(bars, key=Rectangle.get_y):
        pieces = list(row)
        end = max(bar.get_x() + bar.get_width() for bar in pieces)
        if not 0 < end < widest / 40:
            continue
        most = 0.3 * widest / end
        power = 10 ** math.floor(math.log10(most))
        factor = max(power * step for step in (1, 2, 5) if power * step <= most)
        for bar in pieces:  # not with barh, which takes longer and widens the axes
            left, bottom = 0.68 * widest + factor * bar.get_x(), bar.get_y() + bar.get_height() / 4
            size = factor * bar.get_width(), bar.get_height() / 2
            axes.add_patch(Rectangle((left, bottom), *size, facecolor=bar.get_facecolor(), linewidth=0))
        middle = pieces[0].get_y() + pieces[0].get_height() / 2
        words: dict[str, Any] = {"ha": "right", "va": "center", "color": QUIET, "backgroundcolor": PAPER}
        axes.text(0.66 * widest, middle, f"×{factor:,}", size=9, **words)


def figure(height: float = 2.6) -> Figure:
    """An empty figure, so many inches high: add axes with ``.subplots()`` and display it with `show`."""
    # "tight" has a rect, which is the whole figure, and measures all words twice for it.
    once = TightLayoutEngine(rect=None)  # type: ignore[arg-type]  # the stubs do not know that it takes None
    return Figure(figsize=(WIDTH_INCHES, height), dpi=72, layout=once)


class _KeptLayout(LayoutEngine):
    """Put the axes where an earlier drawing left them: clearing a figure resets that."""

    _adjust_compatible = _colorbar_gridspec = True  # what LayoutEngine asks of its subclasses

    def __init__(self, canvas: Figure):
        super().__init__()
        names = ("left", "right", "bottom", "top", "wspace", "hspace")
        self._places = {name: getattr(canvas.subplotpars, name) for name in names}

    def execute(self, fig: Figure) -> None:
        fig.subplots_adjust(**self._places)


def keep_layout(canvas: Figure) -> None:
    """Leave the axes where the last drawing put them, so that they do not move while a slider moves.

    A redraw takes less time then: a layout measures all words of the figure.
    """
    canvas.set_layout_engine(_KeptLayout(canvas))


def paint(canvas: Figure, draw: Draw, values: dict) -> tuple[str, str]:
    """Run `draw(canvas, **values)` on the emptied canvas and return the SVG with its alt text.

    Raises: ValueError if the drawing returns no alt text.
    """
    _empty(canvas)
    with _little_garbage():
        alt = _one_line(draw(canvas, **values))
        return svg(canvas, alt), alt


def _empty(canvas: Figure) -> None:
    for axes in canvas.axes:
        axes.remove()  # Figure.clear alone makes new ticks for axes that nobody sees again
    canvas.clear()


@contextmanager
def _little_garbage() -> Iterator[None]:
    """Free the last drawing, whose artists are in reference cycles, and collect nothing during the next one.

    At the collector's own times, artists are in its oldest generation when they become garbage. To collect
    that generation takes several times as long as a redraw, because it has all objects of torch, too.
    """
    gc.collect(1)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _one_line(alt: str) -> str:
    if not isinstance(alt, str) or not alt.strip():
        raise ValueError(f"the alt text is {alt!r}: say in one or two sentences what the figure shows")
    return " ".join(alt.split())


def svg(canvas: Figure, alt: str) -> str:
    """Return the figure as one line of SVG that says in words what it shows."""
    for axes in canvas.axes:
        axes.minorticks_off()  # a logarithmic axis has dozens, and they take most of the time
        for axis in (axes.xaxis, axes.yaxis):
            if not axis.label.get_text():
                axis.set_label_coords(0, 0)  # otherwise matplotlib measures the ticks to place no words
        _legend_above(axes)
    page = io.StringIO()
    # Not savefig, which draws twice: a slider waits for this.
    FigureCanvasSVG(canvas).print_svg(page, metadata={"Date": None, "Creator": None})
    drawing = page.getvalue().partition("<svg ")[2].partition(">")[2]
    across, down = canvas.get_size_inches() * 72
    opening = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
    size = f'width="{WIDTH_PIXELS}" viewBox="0 0 {across:g} {down:g}" style="max-width: 100%"'
    body = " ".join(line.strip() for line in drawing.splitlines())
    return f'{opening}{size} role="img" aria-label="{html.escape(alt)}">{body}'


def _legend_above(axes: Axes) -> None:
    """Whatever has a label is named above the axes, below the title, unless the axes have a legend."""
    _, labels = axes.get_legend_handles_labels()
    if not labels or axes.get_legend():
        return
    columns = len(labels) if sum(len(label) + 5 for label in labels) < 56 else math.ceil(len(labels) / 2)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 0.99), ncols=columns, borderaxespad=0.2)
    rows = math.ceil(len(labels) / columns)
    axes.set_title(axes.get_title("left"), pad=8 + 13 * rows)


def image_html(drawing: str, alt: str) -> str:
    """An <img> with its alt text, no wider than the page, and no narrower than its words can be read."""
    source = base64.b64encode(drawing.encode()).decode()
    size = f'width="{WIDTH_PIXELS}" style="max-width: 100%; min-width: {NARROWEST_PIXELS}px"'
    return f'<img alt="{html.escape(alt)}" {size} src="data:image/svg+xml;base64,{source}">'


def bundle(drawing: str, alt: str) -> dict[str, str]:
    """Return the picture in the forms that front ends read, each with the alt text.

    In an ``<img>`` no style of the page changes the picture. A page without HTML shows the SVG itself, and a
    terminal prints the alt text.
    """
    return {"text/html": image_html(drawing, alt), "image/svg+xml": drawing, "text/plain": alt}


def show(canvas: Figure, alt: str) -> None:
    """Display a figure with its alt text: one or two sentences that say what it shows.

    Raises: ValueError for a missing alt text.
    """
    alt = _one_line(alt)
    display(bundle(svg(canvas, alt), alt), raw=True)
