"""Make the pictures of the README and the pages: a figure of lesson 01, and the diff of two stages.

    python tools/pictures.py

Both come from what is committed, the outputs of a notebook and the source of the package, so a test can
compare them. It needs nothing but Python.
"""

import ast
import difflib
import json
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs/images"
LINE_HEIGHT, CHARACTER_WIDTH, MARGIN = 18, 7.9, 12
PAPER, INK, FRAME = "#f7f7f7", "#222222", "#cccccc"
MARKS = {"+": "#d9f2dd", "-": "#fbdfdf", "@": "#e4eaf5"}


def figure(lesson: str, call: str) -> str:
    """Return the SVG that the cell with that call left in the committed notebook."""
    book = json.loads((ROOT / f"notebooks/{lesson}.ipynb").read_text("utf-8"))
    outputs = [
        output["data"]["image/svg+xml"]
        for cell in book["cells"]
        for output in cell.get("outputs", [])
        if call in "".join(cell["source"]) and "image/svg+xml" in output.get("data", {})
    ]
    return "".join(outputs[0])


def code_lines(path: str) -> list[str]:
    """The lines of a file without its docstrings, so that a picture of them is small."""
    text = (ROOT / path).read_text("utf-8")
    defined = ast.Module | ast.ClassDef | ast.FunctionDef
    first = [node.body[0] for node in ast.walk(ast.parse(text)) if isinstance(node, defined)]
    docstrings = [
        node for node in first if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    spoken = {line for node in docstrings for line in range(node.lineno, node.end_lineno + 1)}
    return [line for number, line in enumerate(text.splitlines(), 1) if number not in spoken]


def diff_lines(before: str, after: str) -> list[str]:
    """Return the unified diff of the code of two files, with one line of context and no line numbers."""
    texts = [code_lines(path) for path in (before, after)]
    lines = list(difflib.unified_diff(*texts, n=1, lineterm=""))[2:]
    return ["@@" if line.startswith("@@") else line for line in lines]


def diff_picture(before: str, after: str) -> str:
    """Draw the diff of two files as an SVG with alt text."""
    lines = diff_lines(before, after)
    width = 2 * MARGIN + CHARACTER_WIDTH * max(map(len, lines))
    height = 2 * MARGIN + LINE_HEIGHT * (len(lines) + 1)
    rows = [_row(number, line, width) for number, line in enumerate([f"{before} → {after}", *lines])]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'role="img" aria-label="The diff of the code of {before} and {after}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13">\n'
        f'<rect width="100%" height="100%" fill="{PAPER}" stroke="{FRAME}"/>\n'
        + "\n".join(rows)
        + "\n</svg>\n"
    )


def _row(number: int, line: str, width: float) -> str:
    top = MARGIN + number * LINE_HEIGHT
    mark = MARKS.get(line[:1], "") if number else ""
    band = (
        f'<rect x="1" y="{top}" width="{width - 2:.0f}" height="{LINE_HEIGHT}" fill="{mark}"/>'
        if mark
        else ""
    )
    weight = "" if number else ' font-weight="bold"'
    text = (
        f'<text x="{MARGIN}" y="{top + 13}" fill="{INK}"{weight} xml:space="preserve">{escape(line)}</text>'
    )
    return band + text


def pictures() -> dict[str, str]:
    """Each picture's file name and contents."""
    return {
        "stage_bars.svg": figure("01_memory_accounting", "show(fig, stage_bars(fig))"),
        "stage1_stage2.svg": diff_picture("zerolab/stages/stage1.py", "zerolab/stages/stage2.py"),
    }


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, svg in pictures().items():
        (IMAGES / name).write_text(svg, "utf-8")
        print(f"wrote docs/images/{name}")
