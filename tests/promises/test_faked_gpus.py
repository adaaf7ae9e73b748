"""Promise: `verify`, the README's example and the lessons do on four GPUs what they do without one.

The GPUs are faked, and NCCL is the hostile backend: see support/faked_gpus.py.
"""

import contextlib
import io
import linecache
import re
import types

import nbformat
import pytest
from support import ROOT, guides
from support.faked_gpus import fake_gpus
from support.lessons import NAMES

import zerolab
from zerolab.course import rehearsing


@pytest.fixture
def chosen(monkeypatch) -> list[str]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("ZEROLAB_BACKEND_LINE", "off")
    return fake_gpus(monkeypatch)


def run(code: str, names: dict, file: str) -> str:
    """What a cell prints. Its functions are found by their file, as those of a notebook are."""
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, file, "exec"), names)
    return printed.getvalue()


@pytest.mark.parametrize(
    ("stage", "settings"),
    [*((stage, {}) for stage in range(4)), (3, {"shard_size": 2, "precision": "mixed"})],
)
def test_verify_over_nccl(chosen, stage: int, settings: dict):
    report = zerolab.verify(stage, 4, steps=2, **settings)
    assert report.ok and report.backend == "nccl" and chosen == ["nccl", "nccl"]


def test_the_example_of_the_readme(chosen):
    (example,) = guides.blocks("README.md", "python")
    assert run(example, {"__name__": "__main__"}, "<example>") == "[3128228, 3128228]\n"
    assert chosen == ["nccl"]


def cells(name: str) -> list[tuple[str, str]]:
    """The code cells of a committed notebook and what they print, where nbval compares it.

    Checks of exercises are left out.
    """
    (path,) = (ROOT / "notebooks").glob(f"[0-9][0-9]_{name}.ipynb")
    book = nbformat.read(path, as_version=4)
    found = []
    for cell in book.cells:
        if cell.cell_type == "code" and cell.id != "bootstrap":
            printed = "".join(each.text for each in cell.outputs if each.output_type == "stream")
            exercise = re.match(r"# .*[Ee]xercise\n", cell.source)
            code = cell.source.rpartition("\n")[0] if exercise else cell.source
            ignored = exercise or "nbval-ignore-output" in cell.metadata.get("tags", ())
            found.append((code, "" if ignored else printed))
    return found


LONG = {
    name: pytest.mark.long(
        "the other lessons take a seventh of the time; test_verify_over_nccl has every stage"
    )
    for name in (
        *("data_parallel", "zero_stage_1", "zero_stage_2", "zero_stage_3", "residual_memory"),
        *("in_the_wild", "incident_room", "whole_matrices"),
    )
}


@pytest.mark.timeout(900)  # lesson 06 takes a minute on an idle machine
@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG.get(name, [])) for name in NAMES])
def test_a_lesson_prints_what_is_committed(chosen, name: str, monkeypatch):
    line = types.SimpleNamespace(update=lambda *args, **kwargs: None)
    monkeypatch.setattr(rehearsing, "display", lambda *args, **kwargs: line)
    names = {"__name__": "__main__"}
    for number, (code, printed) in enumerate(cells(name)):
        got = re.sub(r".* of on_a_faked_gpu: .*\n", "", run(code, names, f"<cell {number}>"))
        assert printed in got, f"{code}\n{got}"
