"""The committed notebooks: equal to their source, run, clean, in short cells, and truly compared by nbval."""

import json
import os
import re
import subprocess
import sys

import build
import nbformat
import pytest
from stamp import repository_slug
from support import ROOT

NOTEBOOKS = ROOT / "notebooks"
SANITIZE = ROOT / "tests" / "nbval_sanitize.cfg"
COMMITTED = sorted(NOTEBOOKS.glob("*.ipynb"))
LONGEST_CELL = 15


@pytest.fixture(params=COMMITTED, ids=lambda path: path.stem)
def committed(request):
    return request.param.stem, nbformat.read(request.param, as_version=4)


def code_cells(book):
    return [cell for cell in book.cells if cell.cell_type == "code"]


def test_there_is_a_notebook_for_every_source_and_the_other_way_round():
    assert [path.stem for path in COMMITTED] == build.lesson_names() != []


def test_cells_equal_the_source(committed):
    name, book = committed
    source = build.notebook(name, repository_slug())
    assert [cell.source for cell in book.cells] == [cell.source for cell in source.cells]
    assert [cell.id for cell in book.cells] == [cell.id for cell in source.cells]


def test_every_code_cell_was_run_and_in_order(committed):
    """nbval passes a notebook that was never run, so this is asked here."""
    _, book = committed
    assert [cell.execution_count for cell in code_cells(book)] == list(range(1, len(code_cells(book)) + 1))


def test_outputs_are_clean(committed):
    """No error, nothing on stderr, no path of a machine, no image without alt text."""
    _, book = committed
    assert [complaint for cell in book.cells for complaint in build.output_complaints(cell)] == []


def test_output_complaints_are_raised():
    """The test above can fail: each kind of unfit output is found."""
    cell = nbformat.v4.new_code_cell("x")
    bad = {
        "raised": nbformat.v4.new_output("error", ename="E", evalue="", traceback=[]),
        "stderr": nbformat.v4.new_output("stream", name="stderr", text="warning"),
        "path": nbformat.v4.new_output("stream", name="stdout", text="see /home/me/zerolab/ring.py"),
        "alt text": nbformat.v4.new_output("display_data", data={"image/svg+xml": "<svg/>"}),
    }
    for word, output in bad.items():
        cell.outputs = [output]
        (complaint,) = build.output_complaints(cell)
        assert word in complaint


def test_cells_are_short(committed):
    _, book = committed
    long = [cell.source for cell in code_cells(book) if len(cell.source.splitlines()) > LONGEST_CELL]
    assert long == []


def test_markdown_images_have_alt_text(committed):
    _, book = committed
    markdown = "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    assert re.findall(r"!\[\s*\]\(|<img(?![^>]*\balt=)[^>]*>", markdown) == []


def test_the_first_box_tells_what_a_reader_wants_to_know(committed):
    _, book = committed
    first = book.cells[0].source
    for words in ("minutes", "*You need:*", "*Afterwards you can*", "*Paper:*"):
        assert words in first


# A number is not the answer where it is the name of a stage, a lesson and so on.
NAMED = r"\b(?:stages?|lessons?|ranks?|blocks?|layers?|[Tt]able|§) ?\d+(?:(?:,| and| to|, and) \d+)*"


def in_view(cell) -> str:
    """What a reader sees of a cell: the prose, or the outputs without what is folded."""
    if cell.cell_type == "markdown":
        return re.sub(r"<details>.*?</details>", "", cell.source, flags=re.DOTALL)
    shown = [output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    pages = [output.get("data", {}).get("text/html", "") for output in cell.outputs]
    return re.sub(r"<details>.*?</details>|<img[^>]*>", "", "\n".join(shown + pages), flags=re.DOTALL)


def given_away(cells) -> list[str]:
    """The answers of predictions that stand in view beside the guess: in that cell's output or just below."""
    found = []
    for place, cell in enumerate(cells):
        page = "".join(output.get("data", {}).get("text/html", "") for output in cell.get("outputs", []))
        for number in re.findall(r"<summary>The answer</summary><p>([\d.,]*\d)", page):
            near = re.sub(NAMED, "", "\n".join(map(in_view, cells[place : place + 2])))
            if re.search(rf"(?<![\w.,]){re.escape(number)}(?![\w-]|[.,]\d)", near):
                found.append(number)
    return found


def test_no_answer_stands_in_view_before_a_guess(committed):
    _, book = committed
    assert "The answer</summary>" in nbformat.writes(book)
    assert given_away(book.cells) == []


@pytest.mark.parametrize("below", ["That makes 38.5 GB at stage 3.", "It is 385 GB, 38.51 GB or 138.5 GB."])
def test_an_answer_in_view_is_found(below):
    page = {"text/html": "<p>Guess.</p><details><summary>The answer</summary><p>38.5 GB.</p></details>"}
    cell = nbformat.v4.new_code_cell(
        "predict(...)", outputs=[nbformat.v4.new_output("display_data", data=page)]
    )
    printed = nbformat.v4.new_output("stream", name="stdout", text="38.5 GB")
    after = nbformat.v4.new_markdown_cell(below)
    assert given_away([cell, after]) == (["38.5"] if below.startswith("That") else [])
    cell.outputs.insert(0, printed)
    assert given_away([cell, after]) == ["38.5"]


def test_widget_states_are_stored_for_a_page_without_a_kernel(committed):
    _, book = committed
    state = book.metadata.get("widgets", {}).get(build.WIDGET_STATE, {}).get("state", {})
    outputs = [output.get("data", {}) for cell in code_cells(book) for output in cell.outputs]
    views = [data[build.WIDGET_VIEW] for data in outputs if build.WIDGET_VIEW in data]
    assert all(view["model_id"] in state for view in views)


def test_bootstrap_never_installs_torch(committed):
    """--no-deps for the course; the small dependencies by name."""
    _, book = committed
    (cell,) = [cell for cell in code_cells(book) if "%pip" in cell.source]
    installs = [line.split("install -q ")[1] for line in cell.source.splitlines() if "%pip" in line]
    assert installs == [f"--no-deps git+https://github.com/{repository_slug()}", "cloudpickle"]


# ---- nbval compares

TAMPERINGS = {
    "untouched": ("2 + 2 = 4", "2 + 2 = 4"),
    "print": ("2 + 2 = 4", "2 + 2 = 5"),
    "alt_text": ("a red dot", "a blue dot"),
    "line": ("#d00000", "#0000d0"),
}


@pytest.fixture(scope="module")
def nbval_verdicts(tmp_path_factory):
    """What nbval says of a notebook built as the lessons are, and of copies with one output changed."""
    cells = [
        "from zerolab.course import figure, show",
        "print('2 + 2 =', 2 + 2)",
        "fig = figure(1)\nfig.subplots().plot([0], 'o', color='#d00000')\nshow(fig, 'a red dot')",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    built, folder = (
        json.loads(nbformat.writes(build.execute(book, "sample"))),
        tmp_path_factory.mktemp("nbval"),
    )
    for name, tampering in TAMPERINGS.items():
        copy = json.loads(json.dumps(built))
        for cell in copy["cells"]:
            cell["outputs"] = json.loads(json.dumps(cell["outputs"]).replace(*tampering))
        (folder / f"{name}.ipynb").write_text(json.dumps(copy))
    command = [sys.executable, "-m", "pytest", "--nbval", folder, "--nbval-sanitize-with", SANITIZE]
    command += ["-p", "no:cacheprovider", "-q", "-rA", "--color=no", "--rootdir", folder, "-c", "/dev/null"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=folder, env=environ)
    return re.findall(r"^(PASSED|FAILED) (\w+)\.ipynb::Cell (\d)", done.stdout, flags=re.MULTILINE)


def test_nbval_fails_on_a_tampered_output_and_on_nothing_else(nbval_verdicts):
    """Of a picture the words are compared, not the lines: a loss curve may bend on another processor."""
    failed = {(name, int(cell)) for verdict, name, cell in nbval_verdicts if verdict == "FAILED"}
    assert len(nbval_verdicts) == 12 and failed == {("print", 1), ("alt_text", 2)}
