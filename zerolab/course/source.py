"""Show the package's own source: the file that runs, not a copy of it."""

import difflib
import html
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType

from IPython.display import display
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

import zerolab
from zerolab.course.look import INK, PAPER

_PACKAGE = Path(zerolab.__file__).resolve().parent
# Both colours are set on both elements: before a notebook is run, JupyterLab removes `transparent` and
# `inherit`, and the dark theme's white letters would stand on our paper.
_COLOURS = f"background: {PAPER}; color: {INK}"
_PAPER = f"{_COLOURS}; padding: 0.4em 0.8em"
# On a narrow page the code scrolls sideways, because the page's own style breaks lines within words. The
# file's name, which has no blanks, is broken there.
_SCROLLED, _BROKEN = "white-space: pre; overflow-x: auto", "white-space: normal; overflow-wrap: anywhere"
_LETTERS = f"{_COLOURS}; font-family: monospace; line-height: 1.35; margin: 0; {_SCROLLED}"


def show_source(thing, docstring: bool = True) -> None:
    """Show the source of a function, class or module of the package, highlighted, under its file's name.

    `docstring=False` leaves the docstring out, if the lesson has just said the same.

    Raises: TypeError for something that has no Python source.
    """
    text = textwrap.dedent(inspect.getsource(thing)).rstrip()
    if not docstring:
        text = _without_docstring(text, inspect.getdoc(thing))
    name = "" if isinstance(thing, ModuleType) else f", `{thing.__qualname__}`"
    _display(f"`{_path(thing)}`{name}", "python", text)


def show_diff(before, after, context: int = 1) -> None:
    """Show what changes from one module (or function, or class) of the package to another, as a unified diff.

    Docstrings and comments are part of the diff, because they say why. `context` is the number of unchanged
    lines around each change.
    """
    texts = [inspect.getsource(thing).splitlines() for thing in (before, after)]
    names = [_path(thing) for thing in (before, after)]
    lines = list(difflib.unified_diff(texts[0], texts[1], names[0], names[1], n=context, lineterm=""))
    added = sum(line.startswith("+") for line in lines[2:])
    removed = sum(line.startswith("-") for line in lines[2:])
    # Without the line numbers of each header, which change with every edit further up.
    body = ["@@" if line.startswith("@@") else line for line in lines[2:]]
    title = f"`{names[0]}` → `{names[1]}`: {removed} lines go, {added} come"
    _display(title, "diff", "\n".join(body) or "(no difference)")


def _path(thing) -> str:
    path = Path(str(inspect.getsourcefile(inspect.unwrap(thing)))).resolve()  # not the decorator's file
    if not path.is_relative_to(_PACKAGE):
        return path.name
    return path.relative_to(_PACKAGE.parent).as_posix()


def _without_docstring(text: str, docstring: str | None) -> str:
    if not docstring:
        return text
    opening = text.index('"""')
    closing = text.index('"""', opening + 3) + 3
    return text[:opening].rstrip() + text[closing:]


def _display(title: str, language: str, text: str) -> None:
    """Display as HTML with inline colours: nbconvert shows Markdown code in a proportional font."""
    style = HtmlFormatter(
        style="xcode",  # no colour of it has less contrast with the paper than 4.5
        noclasses=True,
        nobackground=True,
        cssstyles=_PAPER,
        prestyles=_LETTERS,
    )
    code = highlight(text, get_lexer_by_name(language), style)
    heading = re.sub("`([^`]*)`", rf'<code style="{_BROKEN}">\1</code>', html.escape(title))
    display({"text/html": f"<p>{heading}</p>{code}", "text/plain": f"{title}\n\n{text}"}, raw=True)
