"""Promise: of two optimizers of one run that save into one folder one is refused, before it writes."""

import sys
from pathlib import Path

import cloudpickle
import pytest
from support.numbered import fill, filled_with, outcome
from support.trained import build as build_with_model
from support.trained import train

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

TOLD = "FileExistsError: another optimizer of this process has {} {}, and its checkpoint would be removed"
DONE = "done"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def build(stage: int = 2) -> zerolab.ZeroOptimizer:
    """On a rank: an optimizer that has state."""
    model, optimizer = build_with_model(stage)
    train(model, optimizer)
    optimizer.zero_grad()
    return optimizer


def follow(folder: Path, steps: list[str], stage: int = 2) -> tuple[list[str], list[str], set[float]]:
    """On a rank: what becomes of each of ``steps``; what is in the folder; what its checkpoint holds.

    A step is the name of an optimizer and what it does: "a saves". An optimizer is built at its first step
    and holds its number in the order of building.
    """
    optimizers: dict[str, zerolab.ZeroOptimizer] = {}
    said = []
    for name, verb in map(str.split, steps):
        if verb == "goes":
            del optimizers[name]
            continue
        if name not in optimizers:
            optimizers[name] = build(stage)
            fill(optimizers[name], ord(name))
        act = zerolab.save if verb == "saves" else zerolab.load
        said.append(outcome(lambda name=name, act=act: act(optimizers[name], folder)))
    last = build(stage)
    found = sorted(path.name for path in folder.glob("generation-*"))
    zerolab.load(last, folder)
    return said, found, filled_with(last)


def test_the_second_optimizer_that_saves_is_refused_on_every_rank(tmp_path: Path):
    for said, found, values in zerolab.launch(follow, 2, tmp_path, ["a saves", "b saves", "a saves"]):
        assert [said[0], said[2]] == [DONE, DONE]
        assert said[1].startswith(TOLD.format("saved into", tmp_path)), said[1]
        assert '"runs/a/critic"' in said[1]
        assert found == ["generation-000001", "generation-000002"] and values == {ord("a")}


def test_an_optimizer_that_saves_where_another_has_loaded_is_refused(tmp_path: Path):
    zerolab.launch(follow, 2, tmp_path, ["a saves"])
    for said, found, values in zerolab.launch(follow, 2, tmp_path, ["a loads", "b saves", "a saves"]):
        assert [said[0], said[2]] == [DONE, DONE]
        assert said[1].startswith(TOLD.format("loaded from", tmp_path)), said[1]
        assert len(found) == 2 and values == {ord("a")}


@pytest.mark.parametrize(
    "steps",
    [
        ["a saves", "b loads", "a saves", "b loads", "a saves"],
        ["a loads", "b loads", "a saves", "b loads", "a saves"],
        ["b loads", "a loads", "a saves", "b loads", "a saves"],
    ],
    ids=["that saved", "that loaded first", "that loaded last"],
)
def test_a_second_optimizer_may_load_what_is_evaluated_beside_one_that_saves(steps: list, tmp_path: Path):
    zerolab.launch(follow, 2, tmp_path, ["a saves"])
    for said, _, _ in zerolab.launch(follow, 2, tmp_path, steps):
        assert said == [DONE] * len(steps)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_new_optimizer_may_save_when_the_old_one_is_gone(stage: int, tmp_path: Path):
    steps = ["a saves", "a loads", "a goes", "b saves", "b goes", "a saves"]
    for said, _, values in zerolab.launch(follow, 2, tmp_path, steps, stage):
        assert said == [DONE] * 4 and values == {ord("a")}


def save_into_two_folders(folder: Path) -> list[set[float]]:
    """On a rank: what two optimizers load that each saved into a folder of its own."""
    optimizers = {name: build() for name in "ab"}
    for name, optimizer in optimizers.items():
        fill(optimizer, ord(name))
        zerolab.save(optimizer, folder / name)
    for name, optimizer in optimizers.items():
        zerolab.load(optimizer, folder / name)
    return [filled_with(optimizer) for optimizer in optimizers.values()]


def test_each_optimizer_has_what_it_saved_in_a_folder_of_its_own(tmp_path: Path):
    assert zerolab.launch(save_into_two_folders, 2, tmp_path) == [[{ord("a")}, {ord("b")}]] * 2
