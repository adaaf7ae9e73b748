"""Promise: each lesson's figures fit a page of 400 pixels and are legible, on light pages and dark ones.

The committed notebooks are shown as static pages with JupyterLab's own styles. The browser draws each figure
twice, with its words and without them, so that each word is compared with the colours that lie behind it.
"""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT
from support.long import long_where
from test_browser import CHROMIUM, PATIENCE_SECONDS, playwright

from zerolab.course.look import NARROWEST_PIXELS, contrast

nbconvert = pytest.importorskip("nbconvert", reason="nbconvert is not installed")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium: apt-get update && apt-get install -y chromium"
)

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PHONE, WIDE = 400, 1300
FIGURES = ".jp-OutputArea-output img[src^='data:image/svg']"
# Of each figure: how far it reaches beyond what can be seen or scrolled to, and its width.
PLACES = """figures => figures.map(figure => {
    let box = figure.parentElement;
    while (box.parentElement && !['auto', 'scroll'].includes(getComputedStyle(box).overflowX))
        box = box.parentElement;
    const [inner, outer] = [figure.getBoundingClientRect(), box.getBoundingClientRect()];
    const scrolls = ['auto', 'scroll'].includes(getComputedStyle(box).overflowX);
    const right = outer.left + (scrolls ? box.scrollWidth : window.innerWidth - outer.left);
    return {beyond: inner.right - right, width: inner.width};
})"""
# Of each word of a figure: the text, its colour, and the colours behind it, most frequent first.
WORDS = """async figure => {
    const drawing = atob(figure.src.split('base64,')[1]);
    const source = new TextDecoder().decode(Uint8Array.from(drawing, c => c.charCodeAt(0)));
    const svg = new DOMParser().parseFromString(source, 'image/svg+xml').documentElement;
    const [, , width, height] = svg.getAttribute('viewBox').split(' ').map(Number);
    for (const [name, size] of [['width', width], ['height', height]]) svg.setAttribute(name, size);
    svg.style = 'position: absolute; left: 0; top: 0';
    document.body.append(svg);
    const origin = svg.getBoundingClientRect();
    const words = [...svg.querySelectorAll('text')].filter(text => text.textContent.trim()).map(text => {
        const box = text.getBoundingClientRect();
        const style = getComputedStyle(text.querySelector('tspan') || text);
        return {text: text.textContent, ink: style.fill, left: box.left - origin.left,
                top: box.top - origin.top, width: box.width, height: box.height};
    });
    svg.querySelectorAll('text').forEach(text => text.remove());
    const plain = new Image();
    plain.src = 'data:image/svg+xml;base64,' +
        btoa(unescape(encodeURIComponent(new XMLSerializer().serializeToString(svg))));
    await plain.decode();
    svg.remove();
    const canvas = new OffscreenCanvas(Math.ceil(width), Math.ceil(height)).getContext('2d');
    let page = figure;  // where the figure is transparent, the page is behind it
    while (page && getComputedStyle(page).backgroundColor === 'rgba(0, 0, 0, 0)') page = page.parentElement;
    canvas.fillStyle = page ? getComputedStyle(page).backgroundColor : 'white';
    canvas.fillRect(0, 0, width, height);
    canvas.drawImage(plain, 0, 0);
    return words.map(word => {
        const [x, y] = [Math.max(0, word.left), Math.max(0, word.top)].map(Math.floor);
        const [w, h] = [Math.max(1, Math.round(word.width)), Math.max(1, Math.round(word.height))];
        const data = canvas.getImageData(x, y, w, h).data, counts = {};
        for (let i = 0; i < data.length; i += 4) {
            const colour = `rgb(${data[i]}, ${data[i + 1]}, ${data[i + 2]})`;
            counts[colour] = (counts[colour] || 0) + 1;
        }
        const behind = Object.keys(counts).sort((one, other) => counts[other] - counts[one])[0];
        return {text: word.text, ink: word.ink, behind};
    });
}"""


@pytest.fixture
def browser() -> Iterator["playwright.Browser"]:
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def static_page(notebook: Path, theme: str, folder: Path) -> Path:
    """The notebook as JupyterLab shows it, in one file."""
    exporter = nbconvert.HTMLExporter(template_name="lab", theme=theme)
    page = folder / f"{notebook.stem}_{theme}.html"
    page.write_text(exporter.from_filename(str(notebook))[0], encoding="utf-8")
    return page


def hexed(colour: str) -> str:
    """'rgb(1, 2, 3)' as '#010203'."""
    return "#" + "".join(f"{int(part):02X}" for part in colour[colour.index("(") + 1 : -1].split(",")[:3])


def illegible(words: list[dict[str, str]]) -> list[dict[str, str]]:
    """The words whose contrast with what is behind most of them is below 4.5."""
    return [word for word in words if contrast(hexed(word["ink"]), hexed(word["behind"])) < 4.5]


def opened(browser: "playwright.Browser", page: Path, width: int) -> "playwright.Page":
    shown = browser.new_page(viewport={"width": width, "height": 900})
    shown.set_default_timeout(PATIENCE_SECONDS * 1000)
    shown.route("http*://**", lambda route: route.abort())  # MathJax and the badges; the figures are here
    shown.goto(page.as_uri(), wait_until="domcontentloaded")
    return shown


@pytest.mark.parametrize(
    "notebook",
    long_where(
        lambda path: path.stem not in ("01_memory_accounting", "06_zero_stage_3"),
        "its figures change only with the lesson",
        NOTEBOOKS,
    ),
    ids=lambda path: path.stem,
)
def test_figures_fit_and_are_legible(browser, notebook, tmp_path):
    for theme in ("light", "dark"):
        page = opened(browser, static_page(notebook, theme, tmp_path), PHONE)
        figures = page.locator(FIGURES)
        for width in (PHONE, WIDE):
            page.set_viewport_size({"width": width, "height": 900})
            places = figures.evaluate_all(PLACES)
            assert places and all(place["beyond"] <= 1 for place in places), (theme, width)
            assert all(place["width"] >= NARROWEST_PIXELS for place in places), (theme, width)
        words = [word for figure in figures.all() for word in figure.evaluate(WORDS)]
        assert len(words) > len(places) and illegible(words) == [], theme
        page.close()


DRAWING = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 300 40">'
    '<rect width="200" height="40" fill="{paper}"/>'
    '<text x="5" y="25" style="fill: {ink}">words</text><text x="220" y="25">outside</text></svg>'
)


@pytest.mark.parametrize(
    ("ink", "paper", "page_colour", "found"),
    [
        ("#222222", "#F7F7F7", "#FFFFFF", []),
        ("#AAAAAA", "#F7F7F7", "#FFFFFF", ["words"]),
        ("#222222", "#0072B2", "#FFFFFF", ["words"]),
        ("#222222", "#F7F7F7", "#111111", ["outside"]),
    ],
    ids=["fine", "pale", "on blue", "on a dark page"],
)
def test_a_word_that_nobody_can_read_is_found(browser, tmp_path, ink, paper, page_colour, found):
    """The test above can fail: the last case has a word where the figure has no paper."""
    page = figure_on_a_page(browser, tmp_path, DRAWING.format(ink=ink, paper=paper), page_colour)
    words = page.locator(FIGURES).evaluate(WORDS)
    page.close()
    assert [word["text"] for word in illegible(words)] == found


@pytest.mark.parametrize(("style", "beyond"), [("max-width: 100%", False), ("", True)])
def test_a_figure_wider_than_its_page_is_found(browser, tmp_path, style, beyond):
    drawing = DRAWING.format(ink="#222222", paper="#F7F7F7")
    page = figure_on_a_page(browser, tmp_path, drawing, "#FFFFFF", style)
    (place,) = page.locator(FIGURES).evaluate_all(PLACES)
    page.close()
    assert (place["beyond"] > 1) == beyond


def figure_on_a_page(
    browser: "playwright.Browser", folder: Path, drawing: str, colour: str, style: str = ""
) -> "playwright.Page":
    source = base64.b64encode(drawing.encode()).decode()
    image = f'<img width="600" style="{style}" src="data:image/svg+xml;base64,{source}">'
    page = folder / "page.html"
    body = f'<body style="margin: 0; background: {colour}">'
    page.write_text(f'{body}<div class="jp-OutputArea-output">{image}</div></body>')
    return opened(browser, page, PHONE)
