"""Promise: a save or load that cannot be says why on every rank, and leaves files and model as they were."""

import errno
import os
import re
import resource
import shutil
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from support.numbered import build, fill, filled_with, load_numbers, outcome, save_numbers
from torch import nn

import zerolab
from zerolab.checkpoint import records
from zerolab.checkpoint.manifest import require_whole
from zerolab.checkpoint.records import Record

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


# Saves that fail.


def fail_to_save(folder: Path) -> dict[str, str]:
    """On a rank: every way to fail, and what was raised; each must leave the folder as it was."""
    optimizer, rank, before = build(), dist.get_rank(), sorted(folder.rglob("*"))

    def no_space(*arguments) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def with_little_space() -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500 if rank == 1 else limits[0], limits[1]))
        try:
            zerolab.save(optimizer, folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def without_commit() -> None:
        replace, os.replace = os.replace, no_space
        try:
            zerolab.save(optimizer, folder)
        finally:
            os.replace = replace

    def out_of_sight() -> None:
        is_dir, Path.is_dir = Path.is_dir, lambda path: rank != 1
        try:
            zerolab.save(optimizer, folder)
        finally:
            Path.is_dir = is_dir

    def without_a_record() -> None:
        write, records.write = records.write, lambda *arguments: write(*arguments)[1 if rank == 0 else 0 :]
        try:
            zerolab.save(optimizer, folder)
        finally:
            records.write = write

    def inside() -> None:
        with optimizer.full_params():
            zerolab.save(optimizer, folder)

    ways = {
        "disk full on rank 1": with_little_space,
        "disk full at the commit": without_commit,
        "a folder of rank 0's own": out_of_sight,
        "a record that is lost": without_a_record,
        "a lambda on rank 1": lambda: zerolab.save(optimizer, folder, extra=(lambda: 0) if rank == 1 else 0),
        "a file": lambda: zerolab.save(optimizer, folder / "LATEST"),
        "no folder": lambda: zerolab.save(optimizer, "/proc/zerolab/checkpoints"),
        "keep 0": lambda: zerolab.save(optimizer, folder, keep=0),
        "keep True": lambda: zerolab.save(optimizer, folder, keep=True),
        "inside full_params": inside,
    }
    found = {}
    for name, way in ways.items():
        found[name] = outcome(way)
        dist.barrier()
        assert sorted(folder.rglob("*")) == before, name
    return found


def assert_messages(found: dict[str, str], patterns: dict[str, str]) -> None:
    assert found.keys() == patterns.keys()
    for name, pattern in patterns.items():
        assert re.match(pattern, found[name], re.DOTALL), (name, found[name])


def test_a_save_that_fails_fails_on_every_rank_and_leaves_nothing(tmp_path: Path):
    zerolab.launch(save_numbers, 2, tmp_path, range(1))
    first, second = zerolab.launch(fail_to_save, 2, tmp_path)
    assert first == second
    expected = {
        "disk full on rank 1": "OSError: .*generation-000002 could not be written: rank 1 failed with.*"
        "File too large",
        "disk full at the commit": "OSError: .*No space left",
        "a folder of rank 0's own": "OSError: .*rank 1 failed with .* a file system that all ranks share",
        "a record that is lost": "ValueError: model.0.weight is not stored as a whole: element 0 of 527",
        "a lambda on rank 1": "OSError: .*rank 1 failed with .*pickle.*lambda",
        "a file": "FileExistsError: .*LATEST",
        "no folder": "FileNotFoundError: .*/proc/zerolab",
        "keep 0": "ValueError: keep is 0: pass how many generations to keep, 1 or more",
        "keep True": "ValueError: keep is True",
        "inside full_params": r"RuntimeError: save inside full_params\(\): leave the with block",
    }
    assert_messages(first, expected)
    ((found,),) = zerolab.launch(load_numbers, 1, [tmp_path])
    assert found[:2] == (0, {0.0})


def fail_alone(folder: Path) -> tuple[str, list[str]]:
    said = outcome(lambda: zerolab.save(build(), folder, extra=lambda: 0))
    return said, os.listdir(folder)


def test_a_save_that_fails_leaves_nothing_on_one_rank_either(tmp_path: Path):
    """On two ranks this does not show which of them removes the folder."""
    ((said, left),) = zerolab.launch(fail_alone, 1, tmp_path)
    assert re.match("OSError: .*could not be written", said) and left == [".lock"]


@pytest.mark.parametrize("keep", [1, 3])
def test_so_many_generations_are_kept_and_each_can_be_loaded(tmp_path: Path, keep: int):
    zerolab.launch(save_numbers, 2, tmp_path, range(5), keep=keep)
    kept = [f"generation-{number:06}" for number in range(6 - keep, 6)]
    assert sorted(os.listdir(tmp_path)) == [".lock", "LATEST", *kept]
    loaded = zerolab.launch(lambda: [zerolab.load(build(), tmp_path / name) for name in kept], 1)
    assert loaded == [list(range(5 - keep, 5))]


# Loads that are refused.


class Renamed(nn.Sequential):
    def __init__(self):
        super().__init__()
        self.add_module("0", nn.Linear(31, 17))
        self.add_module("2", nn.Linear(17, 5))


def groups(model: nn.Module) -> list[dict]:
    first, second, third, fourth = model.parameters()
    return [{"params": [first, third]}, {"params": [second, fourth]}]


def fail_to_load(folder: Path, damaged: dict[str, Path]) -> dict[str, str]:
    """On a rank: what is raised for each optimizer or folder that does not fit; nothing may have changed."""
    plain, in_groups = (nn.Sequential(nn.Linear(31, 17), nn.Linear(17, 5)) for _ in range(2))
    wrong = {
        "another name": build(model=Renamed()),
        "one more": build(model=nn.Sequential(nn.Linear(31, 17), nn.Linear(17, 5), nn.Linear(5, 5))),
        "one less": build(model=nn.Sequential(nn.Linear(31, 17))),
        "another shape": build(model=nn.Sequential(nn.Linear(31, 17), nn.Linear(17, 6))),
        "another optimizer": build(optimizer=torch.optim.SGD),
        "other groups": build(model=in_groups, params=groups(in_groups)),
        "a group less": build(model=plain, params=[plain[0].weight]),
    }
    right = build()
    attempts = {name: (optimizer, folder) for name, optimizer in wrong.items()}
    attempts |= {name: (right, path) for name, path in damaged.items()}
    found = {}
    for name, (optimizer, path) in attempts.items():
        fill(optimizer, 7)
        found[name] = outcome(lambda optimizer=optimizer, path=path: zerolab.load(optimizer, path))
        assert filled_with(optimizer) == {7.0}, name
    with right.full_params():
        found["inside full_params"] = outcome(lambda: zerolab.load(right, folder))
    return found


def damage(folder: Path, here: Path) -> dict[str, Path]:
    """Copies of a checkpoint that did not arrive whole, and folders without one."""
    copies = {name: shutil.copytree(folder, here / name) for name in ("cut", "lost", "no manifest")}
    generation = "generation-000001"
    with open(copies["cut"] / generation / "__1_0.distcp", "r+b") as file:
        file.truncate(5000)
    (copies["lost"] / generation / "__1_0.distcp").unlink()
    (copies["no manifest"] / generation / "manifest.pt").unlink()
    (copies["no manifest"] / "generation-000002").mkdir()  # of a save that was interrupted
    (here / "empty").mkdir()
    return copies | {"empty": here / "empty", "nowhere": here / "nowhere", "a file": folder / "LATEST"}


def test_a_load_that_does_not_fit_is_refused_before_anything_changes(tmp_path: Path):
    zerolab.launch(save_numbers, 2, tmp_path / "saved", range(1))
    damaged = damage(tmp_path / "saved", tmp_path)
    first, second = zerolab.launch(fail_to_load, 2, tmp_path / "saved", damaged)
    assert first == second
    expected = {
        "another name": r"ValueError: parameter 1.weight is of shape \(5, 17\) in the checkpoint and missing",
        "one more": r"ValueError: parameter 2.weight is missing in the checkpoint and of shape \(5, 5\)",
        "one less": r"ValueError: parameter 1.weight is of shape \(5, 17\) in the checkpoint and missing",
        "another shape": r"ValueError: parameter 1.weight is of shape \(5, 17\) in the .* and of .*6, 17",
        "another optimizer": "ValueError: the checkpoint is of Adam and the optimizer is SGD",
        "other groups": "ValueError: parameter group 0 of the checkpoint has 0.bias, and that of",
        "a group less": "ValueError: parameter group 0 of the checkpoint has 0.bias, and that of",
        "cut": r"OSError: .*-000001 is damaged: .* in __1_0.distcp: the file ends \d+ bytes too early",
        "lost": "OSError: .*generation-000001 is damaged: .*No such file.*__1_0.distcp",
        "no manifest": "FileNotFoundError: .*LATEST names generation-000001, which .*generations: none",
        "empty": "FileNotFoundError: no checkpoint in .*empty: no save into this folder was completed",
        "nowhere": "FileNotFoundError: no checkpoint in .*nowhere",
        "a file": "FileNotFoundError: no checkpoint in .*LATEST",
        "inside full_params": r"RuntimeError: load inside full_params\(\)",
    }
    assert_messages(first, expected)


def stored(start: int, stop: int) -> Record:
    return Record("model.a", torch.float32, 10, start, stop, "file", 0, 0, 0)


@pytest.mark.parametrize("missing, parts", [(0, [(4, 10)]), (4, [(0, 4), (6, 10)]), (6, [(0, 6)]), (0, [])])
def test_a_gap_is_no_zeros(missing: int, parts: list):
    manifest = {"tensors": {"model.a": 10}, "records": [stored(*each) for each in parts]}
    with pytest.raises(ValueError, match=f"model.a is not stored as a whole: element {missing} of 10"):
        require_whole(manifest)


def test_records_may_come_in_any_order():
    require_whole({"tensors": {"model.a": 10, "b": 0}, "records": [stored(4, 10), stored(0, 4)]})
