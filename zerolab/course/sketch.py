"""Drawings as SVG: rectangles, lines and words, placed by a plot's own coordinates.

A figure with sliders is drawn again for every move. Text that the browser draws takes a millisecond, is
small, and is sharp at every size.
"""

import html
import math
from collections.abc import Iterable, Mapping, Sequence

INK, PALE, FRAME = "#222222", "#EEEEEE", "#888888"
WIDTH_POINTS = 547.2  # 7.6 inches: text of 10 points looks on the page as it does in the prose around it
_FONTS = "'DejaVu Sans', Verdana, sans-serif"
HATCH = "url(#hatch)"
_DEFINITIONS = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" fill="white"/>'
    '<path d="M0 0V6" stroke="#999999" stroke-width="1.6"/></pattern></defs>'
)
_MARKS = {
    "circle": "M-2.2 0a2.2 2.2 0 1 0 4.4 0a2.2 2.2 0 1 0-4.4 0z",
    "square": "M-2-2h4v4h-4z",
    "triangle": "M0-2.4L2.4 2H-2.4z",
    "cross": "M-2-2L2 2M-2 2L2-2",
}
_ANCHORS = {"left": "start", "middle": "middle", "right": "end"}
_LINE = 1.18  # the distance of two lines of text, in sizes of the font

Point = tuple[float, float]
Ticks = Iterable[float] | Mapping[float, str]


class Panel:
    """A part of the page with coordinates of its own, such as GB by stage; `y` may grow downwards.

    `x` and `y` are the values at left and right, and at bottom and top. Lengths of ink (line widths, font
    sizes, shifts) are in points everywhere.
    """

    def __init__(self, box: Sequence[float], x: Point, y: Point, log: bool, elements: list[str]):
        self.left, self.top, self.width, self.height = box
        self.scale = math.log10 if log else float
        self.x, self.y = [self.scale(v) for v in x], [self.scale(v) for v in y]
        self.elements = elements

    def at(self, x: float, y: float) -> Point:
        """Where a pair of values lies on the page, in points from its upper left corner."""
        return self._across(x), self._down(y)

    def _across(self, x: float) -> float:
        return self.left + (self.scale(x) - self.x[0]) / (self.x[1] - self.x[0]) * self.width

    def _down(self, y: float) -> float:
        return self.top + (self.y[1] - self.scale(y)) / (self.y[1] - self.y[0]) * self.height

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        edge: str = "none",
        line: float = 1.0,
        opacity: float = 1.0,
        radius: float = 0.0,
    ) -> None:
        """A box from the corner (x, y) to the one that is `width` and `height` away."""
        (x0, y0), (x1, y1) = self.at(x, y), self.at(x + width, y + height)
        # Neighbours are drawn without anti-aliasing, so that no light line shows between them.
        crisp = "" if radius or edge != "none" else ' shape-rendering="crispEdges"'
        self.elements.append(
            f'<rect x="{min(x0, x1):.2f}" y="{min(y0, y1):.2f}" width="{abs(x1 - x0):.2f}" '
            f'height="{abs(y1 - y0):.2f}" rx="{radius}" fill="{fill}" stroke="{edge}" '
            f'stroke-width="{line}" opacity="{opacity}"{crisp}/>'
        )

    def line(
        self,
        points: Iterable[Point],
        *,
        colour: str = INK,
        width: float = 1.0,
        dash: str = "",
        fill: str = "none",
        opacity: float = 1.0,
    ) -> None:
        """A line through the points; with a `fill`, the area that it encloses."""
        road = "L".join("{:.2f} {:.2f}".format(*self.at(*point)) for point in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ' stroke-linecap="round"'
        self.elements.append(
            f'<path d="M{road}" fill="{fill}" stroke="{colour}" stroke-width="{width}" '
            f'opacity="{opacity}" stroke-linejoin="round"{dashes}/>'
        )

    def arrow(self, points: Sequence[Point], *, colour: str = INK, width: float = 1.4) -> None:
        """A line that ends in an arrowhead."""
        self.line(points, colour=colour, width=width)
        (x0, y0), (x1, y1) = self.at(*points[-2]), self.at(*points[-1])
        angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
        self.elements.append(
            f'<path d="M1 0L-7-3.6V3.6z" fill="{colour}" '
            f'transform="translate({x1:.2f} {y1:.2f})rotate({angle:.1f})"/>'
        )

    def marks(
        self, points: Iterable[Point], colour: str, shape: str = "circle", *, size: float = 1.0
    ) -> None:
        """A small mark at each point: circle, square, triangle or cross."""
        for x, y in (self.at(*point) for point in points):
            self.elements.append(
                f'<path d="{_MARKS[shape]}" fill="{colour}" stroke="{colour}" '
                f'transform="translate({x:.2f} {y:.2f})scale({size})"/>'
            )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 10,
        colour: str = INK,
        bold: bool = False,
        align: str = "left",
        vertical: str = "middle",
        shift: Point = (0, 0),
        turn: float = 0,
        halo: bool = False,
    ) -> None:
        """Words in one or more lines beside, above, below or around a point; a halo hides lines behind them.

        The width of a word depends on the reader's fonts, so nothing may depend on it.
        """
        lines = html.escape(words, quote=False).split("\n")
        block = (len(lines) - 1) * _LINE * size
        down = {"top": 0.8 * size, "middle": 0.35 * size - block / 2, "bottom": -0.22 * size - block}
        place_x, place_y = self.at(x, y)
        place_x, place_y = place_x + shift[0], place_y + shift[1]
        spans = "".join(
            f'<tspan x="0" y="{down[vertical] + row * _LINE * size:.2f}">{line}</tspan>'
            for row, line in enumerate(lines)
        )
        around = ' stroke="white" stroke-width="4" paint-order="stroke"' if halo else ""
        self.elements.append(
            f'<text transform="translate({place_x:.2f} {place_y:.2f})rotate({turn})" font-size="{size}" '
            f'fill="{colour}" font-weight="{"bold" if bold else "normal"}" '
            f'text-anchor="{_ANCHORS[align]}"{around}>{spans}</text>'
        )

    def x_axis(self, ticks: Ticks, label: str = "", *, size: float = 10, marks: bool = True) -> None:
        """The axis along the lower edge; `ticks` are values, or values with the words to write at them."""
        named, bottom, page = _named(ticks), self.top + self.height, self._page()
        page.line([(self.left, bottom), (self.left + self.width, bottom)], colour=FRAME)
        for value, words in named.items():
            x = self._across(value)
            if marks:
                page.line([(x, bottom), (x, bottom + 3.5)], colour=FRAME)
            page.text(x, bottom + 6, words, align="middle", vertical="top", size=size)
        rows = max((words.count("\n") + 1 for words in named.values()), default=0)
        below = bottom + 9 + size * _LINE * rows
        if label:
            page.text(self.left + self.width / 2, below, label, align="middle", vertical="top")

    def y_axis(self, ticks: Ticks, label: str = "", *, line: bool = True) -> None:
        """The axis along the left edge; without its line only the words."""
        named, page = _named(ticks), self._page()
        if line:
            page.line([(self.left, self.top), (self.left, self.top + self.height)], colour=FRAME)
        for value, words in named.items():
            y = self._down(value)
            if line:
                page.line([(self.left - 3.5, y), (self.left, y)], colour=FRAME)
            page.text(self.left - (7 if line else 4), y, words, align="right")
        widest = max((len(words) for words in named.values()), default=0)
        beside = self.left - 16 - 6 * widest - 6 * label.count("\n")
        if label:
            page.text(beside, self.top + self.height / 2, label, align="middle", turn=-90)

    def _page(self) -> "Panel":
        """The same drawing in plain points, for what is outside the plot's own range."""
        return Panel((0, 0, 1, 1), (0, 1), (1, 0), False, self.elements)


class Sketch(Panel):
    """A whole drawing, `height` inches high; its own coordinates are fractions from the lower left corner."""

    def __init__(self, height: float):
        super().__init__((0, 0, WIDTH_POINTS, 72 * height), (0, 1), (0, 1), False, [])

    def panel(
        self, left: float, bottom: float, width: float, height: float, x: Point, y: Point, log: bool = False
    ) -> Panel:
        """A part of this drawing, placed by fractions of it, with coordinates from x and y."""
        (x0, y0), (x1, y1) = self.at(left, bottom + height), self.at(left + width, bottom)
        return Panel((x0, y0, x1 - x0, y1 - y0), x, y, log, self.elements)

    def key(self, y: float, entries: Mapping[float, tuple[str, str]]) -> None:
        """A line of names in their colours, each behind a small box: {place: (name, colour)}."""
        for place, (name, colour) in entries.items():
            self.text(place, y, f"■ {name}", colour=colour, bold=True)

    def svg(self, alt: str) -> str:
        """The drawing as one line of SVG that says in words what it shows."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height:.2f}" '
            f'role="img" aria-label="{html.escape(alt)}" font-family="{_FONTS}">{_DEFINITIONS}'
            f'<rect width="100%" height="100%" fill="white"/>{"".join(self.elements)}</svg>'
        )


def nice(low: float, high: float, most: int = 8) -> list[float]:
    """Round numbers from low to high, at most so many steps of 1, 2, 2.5 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10((high - low) / most))
    step = next(power * unit for unit in (1, 2, 2.5, 5, 10, 20) if (high - low) / (power * unit) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def powers_of_ten(low: float, high: float) -> dict[float, str]:
    """The powers of ten from low to high with their names, for the ticks of a logarithmic axis."""
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    return {10.0**power: f"{10.0**power:,g}" for power in powers}


def _named(ticks: Ticks) -> Mapping[float, str]:
    """Ticks with names; values are written with as many decimals as the longest of them needs."""
    if isinstance(ticks, Mapping):
        return ticks
    values = list(ticks)
    decimals = max((len(f"{value:.6g}".partition(".")[2]) for value in values), default=0)
    return {value: f"{value:,.{decimals}f}" for value in values}
