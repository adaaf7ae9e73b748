"""The package's own source, live: what a notebook shows is the file that runs, never a copy of it."""

import difflib
import inspect
import textwrap
from pathlib import Path
from types import ModuleType

from IPython.display import display

import zerolab

_PACKAGE = Path(zerolab.__file__).resolve().parent


def show_source(thing, docstring: bool = True) -> None:
    """Show the source of a function, class or module of the package, highlighted, under its file's name.

    `docstring=False` leaves the docstring out, where the lesson's own prose has just said it.

    Raises: TypeError for something that has no Python source.
    """
    text = textwrap.dedent(inspect.getsource(thing)).rstrip()
    if not docstring:
        text = _without_docstring(text, inspect.getdoc(thing))
    name = "" if isinstance(thing, ModuleType) else f", `{thing.__qualname__}`"
    _display(f"`{_path(thing)}`{name}", "python", text)


def show_diff(before, after, context: int = 1) -> None:
    """Show what changes from one module (or function, or class) of the package to another, as a unified diff.

    Docstrings and comments are part of the diff: they are where the files say why. `context` is the number of
    unchanged lines kept around each change.
    """
    texts = [inspect.getsource(thing).splitlines() for thing in (before, after)]
    names = [_path(thing) for thing in (before, after)]
    lines = list(difflib.unified_diff(*texts, *names, n=context, lineterm=""))
    added = sum(line.startswith("+") for line in lines[2:])
    removed = sum(line.startswith("-") for line in lines[2:])
    # The line numbers in a hunk's header say nothing to a reader, and change with every edit further up.
    body = ["@@" if line.startswith("@@") else line for line in lines[2:]]
    title = f"`{names[0]}` → `{names[1]}`: {removed} lines go, {added} come"
    _display(title, "diff", "\n".join(body) or "(no difference)")


def _path(thing) -> str:
    path = Path(inspect.getsourcefile(thing)).resolve()
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
    markdown = f"{title}\n\n```{language}\n{text}\n```"
    display({"text/markdown": markdown, "text/plain": f"{title.replace('`', '')}\n\n{text}"}, raw=True)
