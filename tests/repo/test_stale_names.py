"""Promise: a file, folder or module that a page or a docstring names is there.

Files move, and the sentences that name them stay. A name is ``NAME.py`` or another kind of file, a folder in
backticks, a dotted name of the package, and what a link of a page leads to.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT, guides

import zerolab

PAGES = [*guides.GUIDES, "CHANGELOG.md", "CODE_OF_CONDUCT.md", "cloud/README.md"]
CODE = ("zerolab", "tests", "tools", "notebooks", "examples")
FILE = re.compile(r"(?<![\w./*-])((?:[\w.-]+/)*[\w-]+\.(?:py|ipynb|sh|cfg|toml|cff|md))\b(?!\()")
FOLDER = re.compile(r"`((?:[\w.-]+/)+)`")
MODULE = re.compile(r"(?<![\w./-])(zerolab(?:\.[A-Za-z_]\w*)+)")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
MADE_UP = re.compile(r"(yours|mine|example|program|model|script|mymodule|trainer)\.\w+|.*(NN_|NAME|OWNER).*")
"""What stands for a file of the reader's own, or for any name."""


@functools.cache
def files() -> set[str]:
    """Every file of the repository, from its root."""
    hidden = {".git", ".venv", "__pycache__", "build", "site", ".hypothesis"}
    paths = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if not hidden & set(path.parts)}


def file_is_there(name: str) -> bool:
    """Whether some file's path ends so: ``test_clipping.py`` and ``optimizer/groups.py`` name one each."""
    return any(path == name or path.endswith(f"/{name}") for path in files())


def folder_is_there(name: str) -> bool:
    return any(path.startswith(name) or f"/{name}" in path for path in files())


def module_is_there(dotted: str) -> bool:
    """A module of the package, or a name in one; the attributes of that name are not looked at."""
    _, *names = dotted.split(".")
    if names[0] in zerolab.__all__ and names[0] not in zerolab._MODULES:
        return True
    folder = ROOT / "zerolab"
    for place, name in enumerate(names):
        if (folder / name).is_dir():
            folder /= name
        elif (folder / f"{name}.py").exists():
            return place + 1 == len(names) or names[place + 1] in defined(folder / f"{name}.py")
        else:
            return name in defined(folder / "__init__.py")
    return True


@functools.cache
def defined(path: Path) -> set[str]:
    """The names that a module defines or imports at its top, and the keys of its tables of names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Constant(value=str(name)) if path.name == "__init__.py":
                names.add(name)
    return names


def stale(text: str) -> list[str]:
    """The names in a text that lead to nothing."""
    text = re.sub(r"https?://\S+|(?:\.\./)+", "", text)
    found = [name for name in FILE.findall(text) if not file_is_there(name)]
    found += [name for name in FOLDER.findall(text) if not folder_is_there(name)]
    found += [name for name in MODULE.findall(text) if not module_is_there(name) and not file_is_there(name)]
    return [name for name in found if not MADE_UP.fullmatch(name)]


def docstrings(path: Path) -> Iterator[str]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page: str):
    text = guides.text(page)
    assert stale(text) == []
    links = [link for link in LINK.findall(text) if not (ROOT / page).parent.joinpath(link).exists()]
    assert links == []


@pytest.mark.parametrize("folder", CODE)
def test_what_a_docstring_names_is_there(folder: str):
    found = {}
    for path in (ROOT / folder).rglob("*.py"):
        names = [name for text in docstrings(path) for name in stale(text)]
        if names:
            found[path.relative_to(ROOT).as_posix()] = names
    assert found == {}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("see optimizer.py, ``tests/optimizer/test_clipping.py`` and zero.py", ["zero.py"]),
        ("see optimizer/engine.py", ["optimizer/engine.py"]),
        ("in `zerolab/stages/` and `zerolab/floors/`", ["zerolab/floors/"]),
        ("zerolab.launch, zerolab.memory.model_states, zerolab.memory.gone", ["zerolab.memory.gone"]),
        ("zerolab.optimizer.ZeroOptimizer and zerolab.sharding.cut", ["zerolab.sharding.cut"]),
        ("save it as yours.py; https://example.org/no/such.py", []),
        ("notebooks/00_ranks.ipynb, 99_none.ipynb, CITATION.cff", ["99_none.ipynb"]),
    ],
)
def test_a_stale_name_is_found(text: str, names: list[str]):
    assert stale(text) == names
