"""Promise: of two runs that save into one folder one is refused, and what the other saved is whole."""

import os
import re
import shutil
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch.distributed as dist
from support.numbered import build, fill, filled_with, outcome, save_numbers

import zerolab
from zerolab.checkpoint.folder_lock import FolderLock

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

SAVES = 30


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def alone() -> zerolab.ZeroOptimizer:
    """On a rank: an optimizer that the other ranks have no part in: another run."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return build(process_group=groups[dist.get_rank()])


def save_again_and_again(folder: Path) -> list[str]:
    """On a rank: what became of each save."""
    optimizer, said = alone(), []
    dist.barrier()
    for number in range(SAVES):
        fill(optimizer, number + 100 * dist.get_rank())
        extra = number + 100 * dist.get_rank()
        said.append(outcome(lambda extra=extra: zerolab.save(optimizer, folder, extra=extra)))
        if number == 0:
            dist.barrier()  # by the second save at the latest each finds the other's first
    dist.barrier()
    for generation in folder.glob("generation-*"):
        extra = zerolab.load(optimizer, generation)
        assert filled_with(optimizer) == {extra}
    return said


def test_of_two_runs_that_save_at_the_same_time_one_is_told_and_nothing_is_lost(tmp_path: Path):
    both = zerolab.launch(save_again_and_again, 2, tmp_path)
    refused = [said for said in both[0] + both[1] if said != "done"]
    now = re.escape(f"BlockingIOError: another run is saving into {tmp_path} now: give each run a folder")
    since = rf"FileExistsError: another run has saved generation-\d+ into {re.escape(str(tmp_path))} since"
    assert refused and all(re.match(f"{now}|{since}", said) for said in refused), refused
    assert "done" in (both[0][-1], both[1][-1])
    assert not any("done" in said[said.index(first) :] for said in both for first in said if "since" in first)
    (last,) = zerolab.launch(lambda: zerolab.load(build(), tmp_path), 1)
    winner = both[last // 100]
    assert last % 100 == max(number for number, said in enumerate(winner) if said == "done")


def take_turns(folder: Path) -> list[str]:
    """On a rank: two runs that save one after the other, then the first again; and after it has loaded."""
    optimizer, said = alone(), []
    turns = [(0, "save"), (1, "save"), (0, "save"), (1, "save"), (0, "load"), (0, "save")]
    for rank, what in turns:
        if dist.get_rank() == rank:
            said.append(outcome(lambda what=what: getattr(zerolab, what)(optimizer, folder)))
        dist.barrier()
    return said


def test_a_run_that_finds_anothers_newer_save_is_told(tmp_path: Path):
    first, second = zerolab.launch(take_turns, 2, tmp_path)
    assert second == ["done", "done"]
    told = (
        f"FileExistsError: another run has saved generation-000002 into {tmp_path} since this one saved "
        "generation-000001: give each run a folder of its own"
    )
    assert first == ["done", told, "done", "done"]


def save_where_another_saves(folder: Path) -> list[str]:
    """On a rank: two runs save once each, and the first again while the second saves; then it removes all."""
    optimizer, said = alone(), []
    for rank in (0, 1):
        if dist.get_rank() == rank:
            said.append(outcome(lambda: zerolab.save(optimizer, folder)))
        dist.barrier()
    lock = FolderLock(folder)
    if dist.get_rank() == 1:
        lock.acquire()
    dist.barrier()
    if dist.get_rank() == 0:
        said.append(outcome(lambda: zerolab.save(optimizer, folder)))
    dist.barrier()
    lock.release()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        said.append(outcome(lambda: zerolab.save(optimizer, folder)))
    return said


def test_a_run_that_has_lost_does_not_hold_up_the_other(tmp_path: Path):
    """It is refused before it takes the lock. Otherwise the other run's save at that moment would be refused.

    Where the folder was removed nobody has saved there since.
    """
    first, second = zerolab.launch(save_where_another_saves, 2, tmp_path / "runs")
    assert second == ["done"]
    done, told, done_again = first
    assert done == done_again == "done" and told.startswith("FileExistsError: another run has saved")


def test_a_folder_that_another_process_saves_into_is_left_as_it_is(tmp_path: Path):
    zerolab.launch(save_numbers, 1, tmp_path, range(2))
    (tmp_path / "generation-000003").mkdir()  # the other's, under way
    before = sorted(tmp_path.rglob("*"))
    lock = FolderLock(tmp_path)
    lock.acquire()
    try:
        first, second = zerolab.launch(lambda: outcome(lambda: zerolab.save(build(), tmp_path)), 2)
    finally:
        lock.release()
    assert first == second and first.startswith(f"BlockingIOError: another run is saving into {tmp_path} now")
    assert sorted(tmp_path.rglob("*")) == before
    assert zerolab.launch(lambda: outcome(lambda: zerolab.save(build(), tmp_path)), 1) == ["done"]
    assert "generation-000003" not in os.listdir(tmp_path)
