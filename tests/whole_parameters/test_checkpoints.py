"""State of whole parameters is saved by name: it loads at another stage and world size, to the new owner."""

import sys
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch
from support import training, whole_updates
from support.long import long_where
from support.references import Replicas, copies
from support.user_models import Net
from support.whole_updates import everything, matrices_and_others, together

import zerolab

for module in (sys.modules[__name__], whole_updates):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest

OPTIMIZERS = {
    "Orthogonal": everything(),
    "Muon": matrices_and_others,
    "Adafactor": everything(torch.optim.Adafactor),
}
STEPS = 3


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def losses(model, x, step):
    yield model(x).square().mean()


def build(params, stage: int, precision: str) -> zerolab.ZeroOptimizer:
    torch.manual_seed(0)
    return zerolab.ZeroOptimizer(
        Net(), torch.optim.AdamW, stage=stage, precision=precision, params=params, **training.DEFAULTS
    )


def train(params, stage: int, precision: str, start: int, load_from: Path | None, save_to: Path | None):
    """Train some steps; from and to a checkpoint."""
    optimizer = build(params, stage, precision)
    if load_from is not None:
        zerolab.load(optimizer, load_from)
    for step in range(start, start + STEPS):
        for _ in training.passes(losses, optimizer.model, step, optimizer.rank):
            pass
        optimizer.step()
        optimizer.zero_grad()
    if save_to is not None:
        zerolab.save(optimizer, save_to)
    found: dict[str, torch.Tensor] = {}
    optimizer.gather_params(lambda values: found.update(copies(values.items())))
    return found


def in_one_process(params, before: int, after: int, precision: str) -> dict[str, torch.Tensor]:
    """First for ``before`` ranks, then for ``after``."""
    replicas = Replicas(Net, before, together, params, precision, **training.DEFAULTS)
    passes = lambda model, step, rank: training.passes(losses, model, step, rank)
    replicas.train(passes, STEPS)
    replicas.resize(after, precision)
    replicas.train(passes, STEPS, start=STEPS)
    return copies(replicas.whole.named_parameters())


SIZES = [((2, 2), (3, 3)), ((3, 3), (1, 1)), ((1, 0), (4, 2))]
MIXED = "the same sizes and classes as in fp32"
FEWER = "tests/checkpoint goes on with fewer ranks, and the other sizes with more"


@pytest.mark.parametrize("precision", long_where(lambda each: each == "mixed", MIXED, ["fp32", "mixed"]))
@pytest.mark.parametrize("before, after", long_where(lambda sizes: sizes == SIZES[1], FEWER, SIZES))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_of_a_run_that_was_never_interrupted(
    name: str, before: tuple[int, int], after: tuple[int, int], precision: str, tmp_path: Path
):
    params, (ranks, stage), (new_ranks, new_stage) = OPTIMIZERS[name], before, after
    zerolab.launch(train, ranks, params, stage, precision, 0, None, tmp_path, timeout=60)
    expected = in_one_process(params, ranks, new_ranks, precision)
    for found in zerolab.launch(
        train, new_ranks, params, new_stage, precision, STEPS, tmp_path, None, timeout=60
    ):
        assert training.differing(found, expected) == []


def load(params, stage: int, path: Path) -> str:
    optimizer = build(params, stage, "fp32")
    try:
        zerolab.load(optimizer, path)
    except ValueError as error:
        return str(error)
    return "accepted"


class Namesake(torch.optim.SGD):
    """Another class that is called Muon."""


Namesake.__name__ = "Muon"


class Moved(torch.optim.Muon):
    """Muon, imported from another module."""


Moved.__name__ = Moved.__qualname__ = "Muon"


def of_class(optimizer_class: type, model) -> list[dict]:
    """The groups of Muon and AdamW, with this class in the place of Muon."""
    return [
        group | ({"optimizer": optimizer_class} if "optimizer" in group else {})
        for group in matrices_and_others(model)
    ]


def test_state_of_another_class_of_the_same_name_is_refused(tmp_path: Path):
    zerolab.launch(train, 2, OPTIMIZERS["Muon"], 2, "fp32", 0, None, tmp_path, timeout=60)
    for said in zerolab.launch(load, 2, partial(of_class, Namesake), 2, tmp_path, timeout=60):
        assert said.startswith("the checkpoint is of torch.optim.Muon and the optimizer is test_checkpoints.")


def test_state_of_the_same_class_in_another_module_is_loaded(tmp_path: Path):
    zerolab.launch(train, 2, OPTIMIZERS["Muon"], 2, "fp32", 0, None, tmp_path, timeout=60)
    assert zerolab.launch(load, 2, partial(of_class, Moved), 2, tmp_path, timeout=60) == ["accepted"] * 2


def test_state_of_another_kind_is_refused(tmp_path: Path):
    zerolab.launch(train, 2, OPTIMIZERS["Muon"], 2, "fp32", 0, None, tmp_path, timeout=60)
    for said in zerolab.launch(load, 2, OPTIMIZERS["Orthogonal"], 2, tmp_path, timeout=60):
        assert said.startswith("the checkpoint is of AdamW, Muon and the optimizer is Orthogonal: ")
