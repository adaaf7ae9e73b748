"""Promise: a load that fails after the first value has changed is not trained on, saved or exported."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn

import zerolab
from zerolab.checkpoint import records

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


class Versioned(nn.Linear):
    """A layer that may refuse its extra state."""

    refuses = False

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, version: int) -> None:
        if self.refuses:
            raise ValueError(f"version {version} is too old")


class Run:
    def __init__(self, stage: int):
        torch.manual_seed(0)
        self.model = nn.Sequential(Versioned(4, 4), nn.BatchNorm1d(4))
        self.optimizer = zerolab.ZeroOptimizer(self.model, torch.optim.Adam, stage=stage, lr=0.1)

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.arange(8.0).view(2, 4)).square().sum().backward()
        self.optimizer.step()

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    def values(self) -> dict[str, torch.Tensor]:
        with self.optimizer.full_params():
            return {name: each.detach().clone() for name, each in self._tensors()}


def extra_state_is_refused(run: Run, folder: Path) -> None:
    run.model[0].refuses = run.optimizer.rank == 1
    try:
        zerolab.load(run.optimizer, folder)
    finally:
        run.model[0].refuses = False


def a_record_is_gone(run: Run, folder: Path) -> None:
    """On rank 1 it cannot be read when it was verified, and values are filled in."""
    original = records.fill

    def fill(*args) -> None:
        if run.optimizer.rank == 1:
            raise OSError("stale file handle")
        original(*args)

    records.fill = fill
    try:
        zerolab.load(run.optimizer, folder)
    finally:
        records.fill = original


def said(action: Callable[[], None]) -> str:
    try:
        action()
    except (RuntimeError, OSError, ValueError) as error:
        return str(error)
    return "done"


def failed(how: Callable, stage: int, folder: Path, step_fails: bool) -> tuple[str, list[str], str, bool]:
    """On a rank: what the failed load, what follows, and a step after a load that ends say."""
    run = Run(stage)
    run.train()
    zerolab.save(run.optimizer, folder / "run")
    run.train()
    expected = run.values()
    run.train()
    if step_fails:
        run.optimizer.training.broken_off = "step() failed in the middle"
    first = said(lambda: how(run, folder / "run"))
    actions = [
        run.train,
        lambda: zerolab.save(run.optimizer, folder / "run"),
        lambda: zerolab.export(run.optimizer, folder / "model.pt"),
        run.optimizer.full_grads,
    ]
    after = [said(each) for each in actions]
    zerolab.load(run.optimizer, folder / "run")
    last = said(run.train)
    found = run.values()
    return first, after, last, all(torch.equal(found[name], each) for name, each in expected.items())


@pytest.mark.parametrize("step_fails", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("how", "why"),
    [(extra_state_is_refused, "version 1 is too old"), (a_record_is_gone, "stale file handle")],
)
def test_it_is_refused_until_a_load_has_ended(
    how: Callable, why: str, stage: int, step_fails: bool, tmp_path: Path
):
    for first, after, last, right in zerolab.launch(failed, 2, how, stage, tmp_path, step_fails, timeout=60):
        assert why in first
        for each in after:
            assert each.startswith("an earlier load() failed in the middle") and why in each
            assert "zerolab.load" in each
        assert (last, right) == ("done", True)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def refused_in_inference_mode(folder: Path) -> list[str]:
    run = Run(2)
    run.train()
    zerolab.save(run.optimizer, folder)
    with torch.inference_mode():
        refused = said(lambda: zerolab.load(run.optimizer, folder))
    return [refused, said(run.train)]


def test_a_load_that_was_refused_before_it_began_is_no_failed_one(tmp_path: Path):
    for refused, after in zerolab.launch(refused_in_inference_mode, 2, tmp_path, timeout=60):
        assert "inference_mode" in refused and after == "done"
