"""Promise: a function may leave another stdout behind, and a full disk or a missing folder is named."""

import atexit
import builtins
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import zerolab


class OnlyWrites:
    """A stream that logging tools put in the place of stdout."""

    def write(self, text: str) -> None:
        pass


def replace_stdout(stream, raises: bool) -> int:
    sys.stdout = stream
    if raises:
        raise ValueError("no data")
    return 7


@pytest.mark.parametrize("stream", [None, OnlyWrites()], ids=["None", "no flush"])
def test_a_function_may_leave_another_stdout(stream):
    assert zerolab.launch(replace_stdout, 2, stream, False) == [7, 7]
    with pytest.raises(zerolab.WorkerError, match=r"rank . failed: ValueError: no data"):
        zerolab.launch(replace_stdout, 2, stream, True)


def fill_the_disk(after: Callable) -> bytes:
    """Files may not grow from here on."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return after()


def raise_an_error() -> bytes:
    raise ValueError("no data")


@pytest.mark.parametrize("after", [raise_an_error, lambda: bytes(10**6)], ids=["an error", "a result"])
def test_a_full_disk_is_named_with_the_way_out(after: Callable, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said = (
        rf"it raised an exception, which could not be written to {tmp_path}.*: make room there, or set TMPDIR"
    )
    with pytest.raises(zerolab.WorkerError, match=said):
        zerolab.launch(fill_the_disk, 1, after)
    assert list(tmp_path.iterdir()) == []


def leave_a_file_in_the_way(directory: str) -> bytes:
    """The result's file cannot be written; that of an error can."""
    (found,) = Path(directory).glob("zerolab-*")
    (found / "result-0").symlink_to("/dev/full")
    return bytes(10**6)


def test_a_result_for_which_there_is_no_room(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(zerolab.WorkerError, match=r"its result could not be written to .*No space left"):
        zerolab.launch(leave_a_file_in_the_way, 1, str(tmp_path))


def test_a_working_directory_that_was_removed_is_named(monkeypatch, tmp_path: Path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(FileNotFoundError, match=r"directory of this process was removed.*os\.chdir"):
        zerolab.launch(os.getpid, 1)


def leave_open(folder: Path) -> None:
    rank = os.environ.get("RANK", "") or str(os.getpid())
    builtins.kept_open = open(folder / f"open_{rank}", "w")  # noqa: SIM115  a log that nobody closes
    builtins.kept_open.write("a line")
    atexit.register(lambda: (folder / f"exit_{rank}").write_text("called"))


def test_open_files_are_written_out_and_exit_handlers_called_as_at_the_end_of_a_program(tmp_path: Path):
    zerolab.launch(leave_open, 2, tmp_path)
    found = {path.name.partition("_")[0]: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"open": "a line", "exit": "called"} and len(list(tmp_path.iterdir())) == 4
