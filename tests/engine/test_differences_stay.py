"""Promise: ranks that differ are refused until something makes them alike, however often they try."""

import sys
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


class Run:
    """A run on a rank after one step."""

    def __init__(self, stage: int, folder: Path):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.optimizer = zerolab.ZeroOptimizer(self.model, torch.optim.Adam, stage=stage, lr=0.1)
        self.folder = folder
        self.backward()
        self.optimizer.step()
        zerolab.save(self.optimizer, folder / "before")

    def backward(self) -> None:
        self.model(torch.ones(2, 4)).square().sum().backward()

    def write(self, value: float) -> None:
        with torch.no_grad():
            self.model[2].weight.fill_(value)

    def read_all(self) -> None:
        with self.optimizer.full_params():
            pass

    def load_own_state(self) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def save(self) -> None:
        zerolab.save(self.optimizer, self.folder / "after")

    def export(self) -> None:
        zerolab.export(self.optimizer, self.folder / "model.pt")


def write_on_one(run: Run) -> None:
    if run.optimizer.rank == 1:
        run.write(2.0)


def write_on_one_and_read(run: Run) -> None:
    write_on_one(run)
    run.read_all()


def raise_after_a_write(run: Run) -> None:
    try:
        with run.optimizer.full_params():
            write_on_one(run)
            raise KeyError
    except KeyError:
        pass


def load_on_one(run: Run) -> None:
    if run.optimizer.rank == 1:
        run.load_own_state()


DIFFERENCES = {
    "written on one rank": (write_on_one, (0, 1, 2)),
    "written on one rank, and all read": (write_on_one_and_read, (0, 1, 2)),
    "written on one rank before an exception": (raise_after_a_write, range(4)),
    "loaded on one rank": (load_on_one, range(4)),
}
CASES = [(name, stage) for name, (_, stages) in DIFFERENCES.items() for stage in stages]


def said(action: Callable[[], None]) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return "done"


def tried(name: str, stage: int, folder: Path) -> list[str]:
    """On a rank: what is said of each action after the ranks differ."""
    run = Run(stage, folder)
    run.optimizer.zero_grad()
    DIFFERENCES[name][0](run)
    run.backward()
    step = run.optimizer.step
    return [said(each) for each in (step, step, step, run.save, run.export, step, run.train)]


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_everything_that_compares_ranks_is_refused_again_and_again(name: str, stage: int, tmp_path: Path):
    for found in zerolab.launch(tried, 2, name, stage, tmp_path, timeout=60):
        assert [each for each in found if not each.startswith("ranks disagree about the ")] == []
    assert {path.name for path in tmp_path.iterdir()} <= {"before", "after"}
    assert not list(tmp_path.glob("after/generation*"))


def tried_after_clearing(stage: int) -> list:
    """On a rank: one rank clears its gradients between micro-batches; at last all do."""
    run = Run(stage, Path())
    optimizer = run.optimizer
    optimizer.zero_grad()
    run.backward()
    if optimizer.rank == 1:
        optimizer.zero_grad()
    run.backward()
    found = [said(optimizer.step), said(optimizer.step), said(optimizer.full_grads), said(optimizer.step)]
    return [*found, said(run.train), {name: p.clone() for name, p in whole(run).items()}]


def whole(run: Run) -> dict[str, torch.Tensor]:
    with run.optimizer.full_params():
        return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def trained(stage: int) -> dict[str, torch.Tensor]:
    run = Run(stage, Path())
    run.train()
    return whole(run)


@pytest.mark.parametrize("stage", range(4))
def test_gradients_that_one_rank_cleared_are_refused_until_all_are_cleared(
    stage: int, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    expected = zerolab.launch(trained, 2, stage, timeout=60)[0]
    for *refused, last, values in zerolab.launch(tried_after_clearing, 2, stage, timeout=60):
        assert [each for each in refused if not each.startswith("ranks disagree about the gradients")] == []
        assert last == "done" and all(torch.equal(values[name], expected[name]) for name in expected)


def take_those_of_rank_0(run: Run) -> None:
    with run.optimizer.full_params(from_rank=0):
        pass


def write_on_all(run: Run) -> None:
    run.write(3.0)


def write_on_all_inside(run: Run) -> None:
    with run.optimizer.full_params():
        run.write(3.0)


def load(run: Run) -> None:
    zerolab.load(run.optimizer, run.folder / "before")


WAYS_OUT = [
    ("written on one rank", take_those_of_rank_0),
    ("written on one rank", write_on_all),
    ("written on one rank", write_on_all_inside),
    ("written on one rank", load),
    ("written on one rank before an exception", take_those_of_rank_0),
    ("written on one rank before an exception", load),
    ("loaded on one rank", Run.load_own_state),
    ("loaded on one rank", load),
]


def gone_on(name: str, way: Callable, stage: int, folder: Path) -> tuple[str, list, dict[str, torch.Tensor]]:
    """On a rank: what is said first, then what comes after a way out, and the parameters."""
    run = Run(stage, folder)
    DIFFERENCES[name][0](run)
    first = said(run.train)
    way(run)
    return first, [said(run.train), said(run.save), said(run.export)], whole(run)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize(("name", "way"), WAYS_OUT, ids=lambda each: getattr(each, "__name__", each))
def test_a_way_out_makes_them_alike(name: str, way: Callable, stage: int, tmp_path: Path):
    ranks = zerolab.launch(gone_on, 2, name, way, stage, tmp_path, timeout=60)
    for first, after, values in ranks:
        assert first.startswith("ranks disagree about the ") and after == ["done"] * 3
        assert all(torch.equal(values[key], ranks[0][2][key]) for key in values)
