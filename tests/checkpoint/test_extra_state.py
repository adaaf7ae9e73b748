"""Promise: what modules keep by get_extra_state is saved and loaded, every rank's own."""

import datetime
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from support.numbered import filled_with, outcome
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Counting(nn.Linear):
    """A layer that counts its calls and keeps the last mean, in no parameter and no buffer."""

    def __init__(self, kept: Any = None):
        super().__init__(4, 4)
        self.kept = kept

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


class Forgetful(nn.Linear):
    def get_extra_state(self) -> int:
        return 1


def plain() -> dict:
    return {"calls": 3 + dist.get_rank(), "mean": torch.full((2,), float(dist.get_rank())), "none": None}


def of(*layers: nn.Module, stage: int = 2) -> zerolab.ZeroOptimizer:
    return zerolab.ZeroOptimizer(nn.Sequential(*layers), torch.optim.SGD, stage=stage, lr=0.1)


def save(folder: Path, make: Callable[[], Any]) -> tuple[str, list[str]]:
    optimizer = of(nn.Linear(4, 4), Counting(make()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = outcome(lambda: zerolab.save(optimizer, folder))
    return said, [str(warning.message) for warning in caught if "trust" in str(warning.message)]


def load(folder: Path, stage: int, **options) -> tuple[str, Any]:
    layer = Counting("before")
    optimizer = of(nn.Linear(4, 4), layer, stage=stage)
    said = outcome(lambda: zerolab.load(optimizer, folder, **options))
    return said, layer.kept


@pytest.mark.parametrize("saving, loading, stage", [(2, 2, 3), (2, 2, 0), (2, 3, 1), (3, 1, 2)])
def test_every_rank_gets_back_its_own_or_rank_0s(tmp_path: Path, saving: int, loading: int, stage: int):
    assert zerolab.launch(save, saving, tmp_path, plain) == [("done", [])] * saving
    for rank, (said, kept) in enumerate(zerolab.launch(load, loading, tmp_path, stage)):
        saved_by = rank if saving == loading else 0
        assert said == "done" and kept["calls"] == 3 + saved_by and kept["none"] is None
        assert torch.equal(kept["mean"], torch.full((2,), float(saved_by)))


def test_an_extra_state_that_takes_code_needs_trust(tmp_path: Path):
    ((said, warned),) = zerolab.launch(save, 1, tmp_path, datetime.timedelta)
    assert said == "done" and len(warned) == 1
    assert re.match(
        r"extra_state.0 holds datetime.timedelta: only load\(..., trust=True\) will read it", warned[0]
    )
    ((said, kept),) = zerolab.launch(load, 1, tmp_path, 2)
    assert "extra_state.0 holds" in said and "pass load(..., trust=True)" in said and kept == "before"
    ((said, kept),) = zerolab.launch(load, 1, tmp_path, 2, trust=True)
    assert said == "done" and kept == datetime.timedelta()


def load_into_others(folder: Path) -> dict[str, str]:
    """On a rank: what is said; nothing may have changed."""
    models = {
        "none": lambda: [nn.Linear(4, 4), nn.Linear(4, 4)],
        "elsewhere": lambda: [Counting(), nn.Linear(4, 4)],
        "on rank 0 alone": lambda: [nn.Linear(4, 4), Counting() if dist.get_rank() == 0 else nn.Linear(4, 4)],
        "forgetful": lambda: [nn.Linear(4, 4), Forgetful(4, 4)],
    }
    found = {}
    for case, layers in models.items():
        optimizer = of(*layers())
        before = filled_with(optimizer)
        found[case] = outcome(lambda optimizer=optimizer: zerolab.load(optimizer, folder))
        assert filled_with(optimizer) == before
    optimizer = of(*models["forgetful"]())
    return found | {"saved": outcome(lambda: zerolab.save(optimizer, folder / "other"))}


def test_a_model_that_keeps_other_state_is_refused_by_name(tmp_path: Path):
    zerolab.launch(save, 2, tmp_path, plain)
    first, second = zerolab.launch(load_into_others, 2, tmp_path)
    assert first == second
    missing = "ValueError: the extra state of 1 is there in the checkpoint and missing in the model"
    assert first["none"].startswith(missing) and first["on rank 0 alone"].startswith(missing)
    assert "the extra state of 1 is there in the checkpoint" in first["elsewhere"]
    for case in ("forgetful", "saved"):
        assert "module 1 (Forgetful) has get_extra_state() and no set_extra_state()" in first[case], case
