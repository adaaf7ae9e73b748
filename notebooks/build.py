"""Turn the lessons' scripts into the notebooks that are committed: with badges, run, and with their outputs.

    python notebooks/build.py                    every lesson
    python notebooks/build.py 02_collectives     one

A lesson is written in ``source/NN_name.py``, where it can be reviewed and diffed. The repository's slug in
badges and install lines is what tools/stamp.py reads and replaces. Whatever would make two builds differ
without a reason (cell ids, widget ids, times, the Python version) is replaced by something that depends on
the content alone.
"""

import argparse
import hashlib
import os
import re
import sys
from pathlib import Path

import jupytext
import nbclient
import nbformat
from nbformat import NotebookNode

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "tools"))
from stamp import repository_slug  # noqa: E402

WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
CELL_SECONDS = 120

BOOTSTRAP = """\
# On a fresh Colab this installs the course (never torch, which is there). Anywhere else it does nothing.
import importlib.util

if importlib.util.find_spec("zerolab") is None:
    %pip install -q --no-deps git+https://github.com/{slug}
    %pip install -q cloudpickle"""

BADGES = (
    "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/{slug}/blob/main/notebooks/{name}.ipynb) "
    "[![Launch on Binder](https://mybinder.org/badge_logo.svg)]"
    "(https://mybinder.org/v2/gh/{slug}/HEAD?urlpath=lab/tree/notebooks/{name}.ipynb)"
)


def lesson_names() -> list[str]:
    """The names of the lessons, in order of reading."""
    return sorted(path.stem for path in (HERE / "source").glob("[0-9][0-9]_*.py"))


def notebook(name: str, slug: str) -> NotebookNode:
    """The notebook of a lesson before it is run: its cells, the stamped ones, fixed ids and metadata.

    Raises: ValueError where the script does not begin with a markdown title.
    """
    book = jupytext.read(HERE / "source" / f"{name}.py")
    if not book.cells or not book.cells[0].source.startswith("# "):
        raise ValueError(f"source/{name}.py must begin with a markdown cell whose first line is '# Title'")
    title, *body = book.cells
    for cell, identity in zip(book.cells, _cell_ids(book.cells), strict=True):
        cell.id = identity
        cell.metadata = NotebookNode({k: v for k, v in cell.metadata.items() if k == "tags"})
    badges = nbformat.v4.new_markdown_cell(BADGES.format(slug=slug, name=name), id="badges")
    bootstrap = nbformat.v4.new_code_cell(BOOTSTRAP.format(slug=slug), id="bootstrap")
    cells = [title, badges, bootstrap, *body]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return nbformat.v4.new_notebook(cells=cells, metadata=metadata)


def _cell_ids(cells: list[NotebookNode]) -> list[str]:
    """An id from each cell's text, so that a new cell leaves the others' ids, and the diff, alone."""
    seen: dict[str, int] = {}
    identities = []
    for cell in cells:
        digest = hashlib.sha1(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, 0) + 1
        identities.append(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}")
    return identities


def execute(book: NotebookNode, name: str) -> NotebookNode:
    """Run a notebook with this checkout's zerolab; the same content gives the same outputs.

    Raises: RuntimeError for an output that should not be committed; nbclient's CellExecutionError.
    """
    python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    client = nbclient.NotebookClient(
        book,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": HERE}},
    )
    off = dict.fromkeys(("ZEROLAB_PROGRESS", "ZEROLAB_BACKEND_LINE"), "off")
    client.execute(env=os.environ | off | {"PYTHONPATH": python_path})
    book.metadata.language_info = NotebookNode({"name": "python"})
    for count, cell in enumerate((c for c in book.cells if c.cell_type == "code"), start=1):
        cell.execution_count = count
        cell.outputs = _merge_streams(cell.outputs)
    complaints = [complaint for cell in book.cells for complaint in output_complaints(cell)]
    if complaints:
        raise RuntimeError(f"{name}: " + "\n  ".join(complaints))
    return _rename_widgets(book, name)


def _merge_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Neighbouring prints as one output, as front ends save them; how they were cut depends on timing."""
    merged: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and merged and merged[-1].get("name") == output.name:
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def output_complaints(cell: NotebookNode) -> list[str]:
    """What must not be committed: errors, stderr, paths of this machine, images without alt text."""
    complaints = []
    for output in cell.get("outputs", []):
        text = output.get("text", "") + "".join(
            str(output.get("data", {}).get(t, "")) for t in ("text/plain", "text/markdown")
        )
        if output.output_type == "error":
            complaints.append(f"cell raised {output.ename}: {output.evalue}")
        if output.get("name") == "stderr":
            complaints.append(f"cell wrote to stderr: {text[:300]}")
        if path := re.search(r"(?<![\w.:/])/(?:home|root|tmp|usr|work|opt|Users|content)/\S*", text):
            complaints.append(f"cell printed a path of this machine: {path[0]}")
        data = output.get("data", {})
        said = re.search(r'aria-label="[^"]+"', data.get("image/svg+xml", "")) and data.get("text/plain")
        if any(kind.startswith("image/") for kind in data) and not said:
            complaints.append("cell shows an image without alt text: use zerolab.course.show")
    return [f"{complaint} (in: {cell.source.splitlines()[0]})" for complaint in complaints]


def _rename_widgets(book: NotebookNode, name: str) -> NotebookNode:
    """Replace the random ids of widget models by numbered ones, in the order in which the cells show them."""
    state = book.metadata.get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    text, order = nbformat.writes(book), []

    def visit(identity: str) -> None:
        if identity in state and identity not in order:
            order.append(identity)
            for reference in re.findall(r"IPY_MODEL_(\w+)", str(state[identity])):
                visit(reference)

    for output in (output for cell in book.cells for output in cell.get("outputs", [])):
        visit(output.get("data", {}).get(WIDGET_VIEW, {}).get("model_id", ""))
    for number, identity in enumerate([*order, *sorted(set(state) - set(order))]):
        text = text.replace(identity, hashlib.md5(f"{name} widget {number}".encode()).hexdigest())
    renamed = nbformat.reads(text, as_version=4)
    if state:
        widgets = renamed.metadata.widgets[WIDGET_STATE]
        widgets.state = NotebookNode(sorted(widgets.state.items()))
    return renamed


def main(argv: list[str] | None = None) -> int:
    """Build what was asked for; a failed build leaves the notebook that was there untouched."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"lessons, of {', '.join(lesson_names())}; all by default")
    args = parser.parse_args(argv)
    slug = repository_slug()
    unknown = sorted(set(args.names) - set(lesson_names()))
    if unknown:
        parser.error(f"no lesson {', '.join(unknown)}; there are {', '.join(lesson_names())}")
    for name in args.names or lesson_names():
        nbformat.write(execute(notebook(name, slug), name), HERE / f"{name}.ipynb")
        print(f"built notebooks/{name}.ipynb")
    return 0


if __name__ == "__main__":
    sys.exit(main())
