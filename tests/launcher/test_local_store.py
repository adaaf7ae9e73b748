"""Promise: ranks on one host meet through a file that nobody else can open, whatever an earlier job left."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from conftest import PYTHONPATH

from zerolab.launcher import local_store

RANK = """
    import faulthandler, sys, torch, torch.distributed as dist, zerolab
    faulthandler.dump_traceback_later(100, exit=True)
    zerolab.init_process_group()
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    print(int(ranks), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(monkeypatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def start(rank: int, folder: Path) -> subprocess.Popen:
    """A rank of a job that always has the same name; it stays until its stdin is closed."""
    place = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)}
    place |= {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "7"}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RANK)],
        env=os.environ | place | {"PYTHONPATH": PYTHONPATH, "TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def end(ranks: list[subprocess.Popen], number: int = 0) -> None:
    for rank in ranks:
        if number:
            rank.send_signal(number)
        rank.communicate(timeout=60)


def test_a_job_meets_under_the_name_of_one_that_was_killed(temporary: Path):
    killed = [start(rank, temporary) for rank in range(2)]
    assert [rank.stdout.readline() for rank in killed] == ["2\n", "2\n"]
    end(killed, signal.SIGKILL)
    late = [start(1, temporary), start(0, temporary)]
    assert [rank.stdout.readline() for rank in late] == ["2\n", "2\n"]
    end(late)


def test_two_jobs_of_one_name_are_refused(temporary: Path):
    living = [start(rank, temporary) for rank in range(2)]
    assert [rank.stdout.readline() for rank in living] == ["2\n", "2\n"]
    (note,) = (path for path in Path(local_store.private_folder()).iterdir() if path.suffix == ".note")
    with pytest.raises(RuntimeError, match="another job on this host has the name x and still runs"):
        local_store.announce(str(note), "x")
    assert local_store.look_up(str(note)).startswith(str(note))
    end(living)


def test_what_ended_jobs_left_is_removed_after_a_while(temporary: Path, monkeypatch):
    folder = Path(local_store.private_folder())
    ranks = [start(rank, temporary) for rank in range(2)]
    assert [rank.stdout.readline() for rank in ranks] == ["2\n", "2\n"]
    living = set(folder.iterdir())
    (folder / "old.note").write_text(str(folder / "old.note.1"))
    (folder / "old.note.1").touch()
    local_store.remove_old(str(folder))
    assert len(list(folder.iterdir())) == 4, "all of it is young"
    monkeypatch.setattr(local_store, "OLD_SECONDS", -1.0)
    local_store.remove_old(str(folder))
    assert set(folder.iterdir()) == living
    end(ranks)
    local_store.remove_old(str(folder))
    assert list(folder.iterdir()) == []


def test_the_folder_is_closed_to_others_or_not_used(temporary: Path):
    folder = Path(local_store.private_folder())
    assert folder.parent == temporary and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match=r"drwxrwx---.* set TMPDIR"):
        local_store.private_folder()
    folder.rmdir()
    folder.symlink_to(temporary)
    with pytest.raises(PermissionError, match="nobody else may enter"):
        local_store.private_folder()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to somebody else")
def test_a_folder_that_somebody_else_made_is_not_used():
    os.chown(local_store.private_folder(), 65534, -1)
    with pytest.raises(PermissionError, match="user 65534 owns it"):
        local_store.private_folder()


def test_ranks_whose_rank_0_does_not_come_say_so(monkeypatch, temporary: Path):
    monkeypatch.setattr(local_store, "MEET_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match=r"rank 0 did not come within 0\.1 s"):
        local_store.store_file("job", 1)
