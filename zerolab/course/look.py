"""How every figure of the course looks, and how it reaches the page with its alt text."""

import base64
import html
import io
from collections.abc import Callable

from IPython.display import display
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's colours stay apart for colour-blind readers; every figure also writes the name beside the
# colour.
CATEGORY_COLOURS = {
    "params": "#0072B2",
    "grads": "#E69F00",
    "optimizer": "#009E73",
    "activations": "#CC79A7",
}
# Ranks are not categories: a second set of hues, so that "rank 1" is never mistaken for "gradients".
_RANK_COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB", "#994F00")
INK, PALE = "#222222", "#EEEEEE"
WIDTH_INCHES, DPI = 7.6, 144
WIDTH_PIXELS = 684  # on the page; the PNG has more of them, so that it is sharp on a dense screen
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "svg.hashsalt": "zerolab",
}

Draw = Callable[..., str]


def rank_colour(rank: int) -> str:
    """The colour of a rank in every figure; they repeat after eight, so figures write the number too."""
    return _RANK_COLOURS[rank % len(_RANK_COLOURS)]


def ink_on(colour: str) -> str:
    """Black or white, whichever is read more easily on a colour."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else INK


def paint(draw: Draw, height: float, values: dict) -> tuple[bytes, str]:
    """Run `draw(figure, **values)` in the course's style and return the PNG with its alt text.

    A figure made here belongs to no pyplot state, so nothing is shown twice and nothing has to be closed.

    Raises: ValueError if the drawing returns no alt text.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI)
        canvas = FigureCanvasAgg(figure)
        alt = draw(figure, **values)
        if not isinstance(alt, str) or not alt.strip():
            raise ValueError(
                f"{draw.__name__} returned {alt!r}: a drawing returns its alt text, one or two sentences"
            )
        return _png(canvas), alt


def _png(canvas) -> bytes:
    buffer = io.BytesIO()
    # Level 1 costs a few more kilobytes and saves a third of the time a slider takes to answer.
    canvas.print_png(buffer, pil_kwargs={"compress_level": 1})
    return buffer.getvalue()


def image_html(png: bytes, alt: str) -> str:
    """An <img> with its alt text, no wider than the page."""
    source = base64.b64encode(png).decode()
    size = f'width="{WIDTH_PIXELS}" style="max-width: 100%"'
    return f'<img alt="{html.escape(alt)}" {size} src="data:image/png;base64,{source}">'


def bundle(png: bytes, alt: str) -> dict:
    """The picture in the forms that front ends read, each with the alt text.

    JupyterLab drops the alt text of an ``image/png`` and keeps that of an ``<img>``; nbconvert and
    nbviewer keep both; a page that strips HTML falls back on the PNG, and a terminal reads the alt text
    itself.
    """
    return {
        "data": {
            "text/html": image_html(png, alt),
            "image/png": base64.b64encode(png).decode(),
            "text/plain": alt,
        },
        "metadata": {"image/png": {"alt": alt, "width": WIDTH_PIXELS}},
    }


def show(draw: Draw, *, height: float = 3.2, **values) -> None:
    """Draw one figure and display it with its alt text.

    `draw(figure, **values)` paints on an empty matplotlib figure and returns the alt text.
    """
    shown = bundle(*paint(draw, height, values))
    display(shown["data"], metadata=shown["metadata"], raw=True)


def show_figure(figure: Figure, alt: str) -> None:
    """Display a matplotlib figure made elsewhere, with its alt text.

    Raises: ValueError if the alt text is empty.
    """
    if not alt.strip():
        raise ValueError("the alt text is empty: say in one or two sentences what the figure shows")
    shown = bundle(_png(FigureCanvasAgg(figure)), alt)
    display(shown["data"], metadata=shown["metadata"], raw=True)
