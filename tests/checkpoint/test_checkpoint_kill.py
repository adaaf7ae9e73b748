"""Promise: wherever a save is cut off, the last complete one is loaded, and the next one tidies up."""

import os
import random
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
import torch.distributed as dist
from support.numbered import build, fill, load_numbers, save_numbers

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.fsync")
RANDOM_KILLS = 8


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def watch(folder: Path, notice: Callable[[str], None]) -> None:
    """Call ``notice`` before whatever this process does to the files in ``folder``."""
    fsync = os.fsync

    def audited_fsync(descriptor: int) -> None:
        sys.audit("os.fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    os.fsync = audited_fsync

    def on_event(event: str, arguments: tuple) -> None:
        by_name_alone = event in ("os.remove", "os.rmdir")  # rmtree goes from inside the folder
        if event in WATCHED and (by_name_alone or str(arguments[0]).startswith(str(folder))):
            notice(event)

    sys.addaudithook(on_event)


def save_and_die(folder: Path, moment: int | None) -> int:
    """On a rank: save the number 3, and be killed before the ``moment``-th deed; how many there were."""
    optimizer, deeds = build(), []
    fill(optimizer, 3)

    def notice(event: str) -> None:
        if len(deeds) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        deeds.append(event)

    watch(folder, notice)
    zerolab.save(optimizer, folder, extra=3)
    return len(deeds)


def test_killed_at_any_moment_of_a_save_the_last_one_is_loaded_and_the_next_one_tidies_up(tmp_path: Path):
    zerolab.launch(save_numbers, 1, tmp_path / "first", range(1, 3))
    (moments,) = zerolab.launch(
        save_and_die, 1, shutil.copytree(tmp_path / "first", tmp_path / "whole"), None
    )
    folders = [shutil.copytree(tmp_path / "first", tmp_path / str(moment)) for moment in range(moments)]
    for moment, folder in enumerate(folders):
        with pytest.raises(zerolab.WorkerError, match="SIGKILL"):
            zerolab.launch(save_and_die, 1, folder, moment)
    (found,) = zerolab.launch(load_numbers, 1, [*folders, tmp_path / "whole"])
    numbers = [extra for extra, _, _ in found]
    assert numbers == sorted(numbers) and set(numbers) == {2, 3}, "committed once, and never taken back"
    for extra, values, files in found:
        assert values == {extra}
        assert files[0] == "LATEST" and len(files) == 3 and all("generation-" in f for f in files[1:])


def save_until_killed(folder: Path, victims: tuple[int, ...], delay: float) -> None:
    optimizer = build()
    if dist.get_rank() in victims:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for number in range(1, 10_000):
        fill(optimizer, number)
        zerolab.save(optimizer, folder, extra=number)
        if dist.get_rank() == 0:
            (folder / "done").write_text(str(number))


def test_killed_at_random_the_last_save_that_returned_is_never_lost(tmp_path: Path):
    chance = random.Random(0)
    folders = [tmp_path / str(index) for index in range(RANDOM_KILLS)]
    zerolab.launch(lambda: [save_numbers(folder, range(1)) for folder in folders], 1)
    for folder in folders:
        victims = chance.choice([(0,), (1,), (0, 1)])
        with pytest.raises(zerolab.WorkerError, match="SIGKILL"):
            zerolab.launch(save_until_killed, 2, folder, victims, chance.uniform(0.0, 0.15))
    (found,) = zerolab.launch(load_numbers, 1, folders)
    for folder, (extra, values, files) in zip(folders, found, strict=True):
        done = int((folder / "done").read_text()) if (folder / "done").exists() else 0
        assert values == {extra} and extra in (done, done + 1)
        assert len([name for name in files if name.startswith("generation-")]) <= 2
