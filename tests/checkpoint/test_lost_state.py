"""Promise: a save loses no state and stores no half of a step: it is refused, with the way out."""

import signal
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


class Counts(nn.Module):
    """It stores a number by _save_to_state_dict, as observers and metrics do."""

    seen = 0

    def forward(self, x):
        self.seen += 1
        return x

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "seen"] = self.seen


class OwnKey(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)

    def state_dict(self):
        return super().state_dict() | {"steps": self.steps}


class Renamed(nn.Linear):
    """It stores what it has under another name too: nothing is lost."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "w"] = self.weight if keep_vars else self.weight.detach()


def saved(kind: str, stage: int, folder: Path) -> str:
    layer = Renamed(4, 4) if kind == "renamed" else nn.Linear(4, 4)
    model = nn.Sequential(layer, Counts() if kind == "module" else nn.Identity())
    of_class = OwnKey if kind == "optimizer" else torch.optim.SGD
    optimizer = zerolab.ZeroOptimizer(model, of_class, stage=stage, lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    try:
        zerolab.save(optimizer, folder)
    except ValueError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "kind, said",
    [
        ("module", "module 1 (Counts) stores seen in its state_dict"),
        ("optimizer", "OwnKey.state_dict() has steps besides state and param_groups"),
        ("renamed", "saved"),
        ("plain", "saved"),
    ],
)
def test_state_that_a_checkpoint_would_lose_is_refused(tmp_path: Path, stage: int, kind: str, said: str):
    found = zerolab.launch(saved, 2, kind, stage, tmp_path, timeout=60)
    assert [each[: len(said)] for each in found] == [said] * 2
    assert any(tmp_path.iterdir()) == (said == "saved")


class Preempted(torch.optim.SGD):
    """A signal comes in the middle of its step."""

    armed = False

    def step(self, closure=None):
        if Preempted.armed:
            signal.raise_signal(signal.SIGUSR1)
        return super().step(closure)


def save_in_a_step(stage: int, folder: Path) -> list[str]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = zerolab.ZeroOptimizer(model, Preempted, stage=stage, lr=0.1)
    said = []

    def handle(number, frame):
        try:
            zerolab.save(optimizer, folder)
        except RuntimeError as error:
            said.append(str(error))

    signal.signal(signal.SIGUSR1, handle)
    model(torch.ones(1, 4)).sum().backward()
    Preempted.armed = True
    optimizer.step()
    Preempted.armed = False
    zerolab.save(optimizer, folder)
    return said


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_save_in_the_middle_of_a_step_is_refused_and_the_next_one_works(tmp_path: Path, stage: int):
    for said in zerolab.launch(save_in_a_step, 2, stage, tmp_path, timeout=60):
        assert said and all(
            each.startswith("save in the middle of step(), from a signal handler") for each in said
        )


class Steps(nn.Module):
    """In the middle of a save it steps the optimizer, as another thread may."""

    optimizer: zerolab.ZeroOptimizer
    said = ""

    def forward(self, x):
        return x

    def get_extra_state(self):
        try:
            self.optimizer.step()
        except RuntimeError as error:
            self.said = str(error)
        return {}

    def set_extra_state(self, state):
        pass


def step_in_a_save(folder: Path) -> str:
    model = nn.Sequential(nn.Linear(4, 4), steps := Steps())
    steps.optimizer = optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    model(torch.ones(1, 4)).sum().backward()
    zerolab.save(optimizer, folder)
    return steps.said


def test_a_step_in_the_middle_of_a_save_is_refused(tmp_path: Path):
    (said,) = zerolab.launch(step_in_a_save, 1, tmp_path, timeout=60)
    assert said.startswith("the run is in SAVE and cannot go to STEP: let save end first"), said
