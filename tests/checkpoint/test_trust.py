"""Promise: loading a checkpoint runs no code from it, unless the user asks for that."""

import datetime
import io
import os
import pickle
import re
import shutil
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
import torch
from support.numbered import build, filled_with, outcome
from torch import nn

import zerolab
from zerolab.checkpoint import manifest, records

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Trap:
    """What whoever writes a file can put into it."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def save(folder: Path, make_extra: Callable) -> list[str]:
    """On a rank: the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zerolab.save(build(), folder, extra=make_extra())
    caught = [warning for warning in caught if "trust" in str(warning.message)]
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def load(folder: Path) -> str:
    optimizer = build()
    before = filled_with(optimizer)
    said = outcome(lambda: zerolab.load(optimizer, folder))
    assert filled_with(optimizer) == before or said == "done"
    return said


def load_trusting(folder: Path):
    return zerolab.load(build(), folder, trust=True)


def test_no_code_in_an_extra_runs_unless_it_is_asked_for(tmp_path: Path):
    folder, trap = tmp_path / "saved", tmp_path / "sprung"
    (said, *more), _ = zerolab.launch(save, 2, folder, lambda: Trap(trap))
    assert not more and said == "extra.0 holds posix.mkdir: only load(..., trust=True) will read it"
    first, second = zerolab.launch(load, 2, folder)
    assert first == second and not trap.exists()
    assert re.match(r"OSError: .*extra.0 holds posix.mkdir.* pass load\(\.\.\., trust=True\)", first)
    zerolab.launch(load_trusting, 1, folder)
    assert trap.exists()


def test_no_code_in_any_other_file_runs(tmp_path: Path):
    folder, trap = tmp_path / "saved", tmp_path / "sprung"
    zerolab.launch(save, 1, folder, lambda: None)
    generation = folder / "generation-000001"
    (generation / ".metadata").write_bytes(pickle.dumps(Trap(trap)))
    assert zerolab.launch(load, 1, folder) == ["done"] and not trap.exists()
    for file in ("manifest.pt", "__0_0.distcp"):
        copy = shutil.copytree(folder, tmp_path / file)
        torch.save(Trap(trap), copy / "generation-000001" / file)
        (said,) = zerolab.launch(load, 1, copy)
        assert re.match("OSError: .*damaged|UnpicklingError: manifest holds posix.mkdir", said), said
        assert not trap.exists(), file


def test_no_code_in_a_tensors_record_runs_even_where_its_checksum_is_right(tmp_path: Path):
    folder, trap = tmp_path / "saved", tmp_path / "sprung"
    zerolab.launch(save, 1, folder, lambda: None)
    generation = folder / "generation-000001"
    stored = manifest.read(generation, trust=False)
    torch.save(Trap(trap), generation / "trap")
    content = (generation / "trap").read_bytes()
    for key in stored["tensors"]:
        (record,) = stored["records"][key]
        stored["records"][key] = [
            record._replace(file="trap", offset=0, length=len(content), checksum=zlib.crc32(content))
        ]
    flat = [record for each in stored["records"].values() for record in each]
    manifest.write(generation, stored | {"records": flat})
    (said,) = zerolab.launch(load, 1, folder)
    assert "UnpicklingError" in said and not trap.exists()


def test_torchs_own_guard_stands_behind_the_list_of_names(tmp_path: Path, monkeypatch):
    """The list is made without loading, so it could miss a name."""
    content, trap = io.BytesIO(), tmp_path / "sprung"
    torch.save(Trap(trap), content)
    monkeypatch.setattr(records, "_needs_code", lambda content: "")
    with pytest.raises(pickle.UnpicklingError):
        records.unpickle("extra.0", content.getvalue(), trust=False)
    assert not trap.exists()


PLAIN = {
    "step": 3,
    "scheduler": {"last_epoch": 4, "milestones": [1, 2], "base_lrs": [0.1]},
    "random": torch.arange(10, dtype=torch.uint8),
    "text": "ä",
    "bytes": b"abc",
    "set": {1, 2},
    "nothing": None,
    "pair": (1.5, True),
}


def test_plain_values_and_tensors_need_no_trust(tmp_path: Path):
    assert zerolab.launch(save, 1, tmp_path, lambda: PLAIN) == [[]]
    (found,) = zerolab.launch(lambda: zerolab.load(build(), tmp_path), 1)
    random = found.pop("random")
    assert torch.equal(random, PLAIN["random"])
    assert found == {key: value for key, value in PLAIN.items() if key != "random"}


def save_with_hyperparameter(folder: Path, make: Callable) -> tuple[str, list[str]]:
    """On a rank: what save says, and its warnings."""
    model = nn.Linear(3, 3)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "schedule": make()}]
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, params=groups, lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = outcome(lambda: zerolab.save(optimizer, folder))
    if said == "done":
        said = outcome(lambda: zerolab.load(optimizer, folder))
    return said, [str(each.message) for each in caught if "trust" in str(each.message)]


NAMED = "this checkpoint: hyperparameter schedule of parameter group 1"


def test_a_hyperparameter_that_takes_code_is_named_once(tmp_path: Path):
    (said, warned), (other, silent) = zerolab.launch(
        save_with_hyperparameter, 2, tmp_path, lambda: datetime.timedelta(1)
    )
    assert warned == [f"{NAMED} holds datetime.timedelta: only load(..., trust=True) will read it"]
    assert silent == [] and said == other and "pass load(..., trust=True)" in said


def test_a_hyperparameter_that_does_not_pickle_is_refused_by_name_on_every_rank(tmp_path: Path):
    for said, warned in zerolab.launch(save_with_hyperparameter, 2, tmp_path, lambda: lambda step: step):
        assert re.match(f"ValueError: {NAMED} cannot be saved: .*lambda.*. Keep what can be pickled", said)
        assert warned == []


@pytest.mark.parametrize("value", [1, 0.5, "cosine", None, True, (0.9, 0.99), [1, 2], {"a": 1}])
def test_plain_hyperparameters_need_no_trust(tmp_path: Path, value):
    assert zerolab.launch(save_with_hyperparameter, 1, tmp_path, lambda: value) == [("done", [])]
