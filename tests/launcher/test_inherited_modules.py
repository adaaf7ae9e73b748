"""Promise: ranks inherit zerolab from the fork server, and get its source as it is at their launch."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import zerolab
from zerolab.launcher import forkclient

LESSON = "course/lessons/in_the_wild/settings.py"


@pytest.fixture
def clone(monkeypatch, tmp_path: Path) -> Path:
    """A copy of zerolab, which ranks import in place of this one."""
    folder = tmp_path / "zerolab"
    shutil.copytree(Path(zerolab.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def append(file: Path, line: str) -> None:
    with file.open("a") as end:
        end.write(f"\n{line}\n")


def importer_of(module: str) -> Callable[[], tuple[int, int]]:
    """A function for a rank: the process that imported a module, and the parent of the rank."""

    def look() -> tuple[int, int]:
        return sys.modules[module].IMPORTER, os.getppid()

    return look


def test_ranks_inherit_what_the_package_offers(clone: Path):
    append(clone / "optimizer/optimizer.py", "import os; IMPORTER = os.getpid()")
    for _ in range(2):
        (importer, parent), _ = zerolab.launch(importer_of("zerolab.optimizer.optimizer"), 2)
        assert importer == parent == forkclient.current_pid()


def test_ranks_inherit_the_modules_that_the_call_refers_to(clone: Path):
    from zerolab.course.lessons.in_the_wild import settings

    append(clone / LESSON, "import os; IMPORTER = os.getpid()")

    def look() -> tuple[int, int]:
        return settings.IMPORTER, os.getppid()

    for _ in range(2):
        ((importer, parent),) = zerolab.launch(look, 1)
        assert importer == parent


def answer() -> object:
    from zerolab.optimizer import slices

    return getattr(slices, "ANSWER", None)


def test_a_source_file_that_changes_between_launches_is_imported_again(clone: Path):
    source = clone / "optimizer/slices.py"
    first = source.read_text()
    assert zerolab.launch(answer, 2) == [None, None]
    for value in (1, 22, 333):  # of different length: a source's age is noted in whole seconds
        source.write_text(f"{first}\nANSWER = {value}\n")
        assert zerolab.launch(answer, 2) == [value, value]


def test_an_older_file_in_place_of_one_is_seen(clone: Path):
    source = clone / "optimizer/slices.py"
    assert zerolab.launch(answer, 1) == [None]
    append(source, "ANSWER = 'restored'")
    os.utime(source, (1, 1))  # as an archive unpacks it
    assert zerolab.launch(answer, 1) == ["restored"]


def test_a_file_that_changes_while_it_is_imported_is_imported_again(clone: Path):
    source = clone / "optimizer/slices.py"
    append(
        source, f"import pathlib; pathlib.Path({str(source)!r}).open('a').write('\\nANSWER = \"late\"\\n')"
    )
    assert zerolab.launch(answer, 1) == [None]
    assert zerolab.launch(answer, 1) == ["late"]


def test_a_broken_source_is_the_error_of_the_launch_until_it_is_mended(clone: Path):
    source = clone / "optimizer/slices.py"
    sound = source.read_text()
    assert zerolab.launch(answer, 1) == [None]
    source.write_text(sound + "\nANSWER = (\n")
    with pytest.raises(zerolab.WorkerError, match="SyntaxError: '\\(' was never closed"):
        zerolab.launch(answer, 1)
    source.write_text(sound + "\nANSWER = 'mended'\n")
    assert zerolab.launch(answer, 1) == ["mended"]
