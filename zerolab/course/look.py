"""How every figure of the course looks, and how it reaches the page with its alt text."""

import base64
import html
from collections.abc import Callable

from IPython.display import display

from zerolab.course.sketch import INK, Sketch

# Colour-blind readers can tell Okabe and Ito's colours apart; every figure also writes the names.
CATEGORY_COLOURS = {
    "params": "#0072B2",
    "grads": "#E69F00",
    "optimizer": "#009E73",
    "activations": "#CC79A7",
}
# Ranks have other colours than categories, so that "rank 1" is not mistaken for "gradients".
_RANK_COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB", "#994F00")
WIDTH_PIXELS = 684  # less on a narrower page

Draw = Callable[..., str]


def rank_colour(rank: int) -> str:
    """The colour of a rank in every figure; they repeat after eight, so figures write the number too."""
    return _RANK_COLOURS[rank % len(_RANK_COLOURS)]


def ink_on(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else INK


def paint(draw: Draw, height: float, values: dict) -> tuple[str, str]:
    """Run `draw(sketch, **values)` on an empty sketch and return the SVG with its alt text.

    Raises: ValueError if the drawing returns no alt text.
    """
    sketch = Sketch(height)
    alt = draw(sketch, **values)
    if not isinstance(alt, str) or not alt.strip():
        name = getattr(draw, "__name__", repr(draw))
        raise ValueError(f"{name} returned {alt!r}: a drawing returns its alt text, one or two sentences")
    return sketch.svg(alt), alt


def image_html(svg: str, alt: str) -> str:
    """An <img> with its alt text, no wider than the page."""
    source = base64.b64encode(svg.encode()).decode()
    size = f'width="{WIDTH_PIXELS}" style="max-width: 100%"'
    return f'<img alt="{html.escape(alt)}" {size} src="data:image/svg+xml;base64,{source}">'


def bundle(svg: str, alt: str) -> dict[str, str]:
    """The picture in the forms that front ends read, each with the alt text.

    In an ``<img>`` no style of the page changes the picture. A page without HTML shows the SVG itself, and a
    terminal prints the alt text.
    """
    return {"text/html": image_html(svg, alt), "image/svg+xml": svg, "text/plain": alt}


def show(draw: Draw, *, height: float = 3.2, **values) -> None:
    """Display one figure: `draw(sketch, **values)` draws on an empty sketch and returns its alt text."""
    display(bundle(*paint(draw, height, values)), raw=True)
