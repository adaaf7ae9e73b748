"""Promise: state in any form, of lists, of columns, of 16 bits or bytes, is the same after save and load."""

import sys
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from support import kept_states, training
from support.long import long_where
from support.references import Replicas, copies
from support.user_models import Net

import zerolab
from zerolab.checkpoint import generations, manifest
from zerolab.optimizer.shards import allocate_state

for module in (sys.modules[__name__], kept_states):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest

STEPS = 4


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def losses(model, x, step):
    yield model(x).square().mean()


def build(of_class: type, stage: int, **settings) -> zerolab.ZeroOptimizer:
    torch.manual_seed(0)
    return zerolab.ZeroOptimizer(Net(), of_class, stage=stage, lr=0.02, **settings)


def train(optimizer: zerolab.ZeroOptimizer, start: int) -> None:
    for step in range(start, start + STEPS):
        for _ in training.passes(losses, optimizer.model, step, optimizer.rank):
            pass
        optimizer.step()
        optimizer.zero_grad()


def values(optimizer: zerolab.ZeroOptimizer) -> dict[str, torch.Tensor]:
    with optimizer.full_params():
        return copies(optimizer.model.named_parameters())


def train_and_save(of_class: type, stage: int, path: Path, **settings) -> None:
    optimizer = build(of_class, stage, **settings)
    train(optimizer, 0)
    zerolab.save(optimizer, path)


def load_and_train(of_class: type, stage: int, path: Path, fresh: bool, **settings):
    """``fresh``: without state of its own before it loads."""
    optimizer = build(of_class, stage, **settings)
    if not fresh:
        train(optimizer, 100)
    zerolab.load(optimizer, path)
    train(optimizer, STEPS)
    return values(optimizer)


def never_interrupted(of_class: type, before: int, after: int) -> dict[str, torch.Tensor]:
    """In one process, first for ``before`` ranks and then for ``after``."""
    replicas = Replicas(Net, before, of_class, lr=0.02)
    passes = lambda model, step, rank: training.passes(losses, model, step, rank)
    replicas.train(passes, STEPS)
    replicas.resize(after)
    replicas.train(passes, STEPS, start=STEPS)
    return copies(replicas.whole.named_parameters())


OFFLOADED = "the same states as without offloading, and tests/offload stores those of other classes"


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("settings", long_where(bool, OFFLOADED, [{}, {"offload": "cpu"}]), ids=str)
@pytest.mark.parametrize("of_class", kept_states.STORABLE)
def test_the_bits_of_a_run_that_was_never_interrupted(of_class, settings, fresh: bool, tmp_path: Path):
    zerolab.launch(train_and_save, 2, of_class, 1, tmp_path, timeout=60, **settings)
    expected = never_interrupted(of_class, 2, 3)
    found = zerolab.launch(load_and_train, 3, of_class, 3, tmp_path, fresh, timeout=60, **settings)
    for each in found:
        assert training.differing(each, expected) == []


def forms(optimizer: zerolab.ZeroOptimizer) -> list:
    """Type, dtype, shape and strides of the state of whole parameters and of slices."""

    def form(value):
        if isinstance(value, torch.Tensor):
            return value.dtype, tuple(value.shape), value.stride() if value.numel() else ()
        if isinstance(value, (list, tuple)):
            return [form(each) for each in value]
        return {key: form(each) for key, each in value.items()} if isinstance(value, dict) else type(value)

    return [(each.span.name, form(optimizer.state.get(each.tensor, {}))) for each in optimizer.slices]


def forms_before_and_after(of_class: type, path: Path) -> tuple[list, list]:
    optimizer = build(of_class, 2)
    train(optimizer, 0)
    before = forms(optimizer)
    zerolab.save(optimizer, path)
    again = build(of_class, 2)
    zerolab.load(again, path)
    return before, forms(again)


@pytest.mark.parametrize("of_class", kept_states.STORABLE)
def test_state_has_the_form_that_it_had(of_class: type, tmp_path: Path):
    for before, after in zerolab.launch(forms_before_and_after, 2, of_class, tmp_path, timeout=60):
        assert before == after and any(form for _, form in before)


def state_dict_round_trip(of_class: type) -> tuple[list, list]:
    optimizer = build(of_class, 2)
    train(optimizer, 0)
    again = build(of_class, 2)
    again.load_state_dict(optimizer.state_dict())
    return forms(optimizer), forms(again)


def test_a_state_dict_keeps_dtypes_too():
    for before, after in zerolab.launch(state_dict_round_trip, 2, kept_states.Half, timeout=60):
        assert before == after


def test_the_manifest_describes_nested_state_and_has_no_values(tmp_path: Path):
    zerolab.launch(train_and_save, 2, kept_states.Factors, 1, tmp_path, timeout=60)
    stored = manifest.read(generations.find(tmp_path), trust=False)
    state = stored["state"]["blocks.0.first.weight"]
    assert [each.is_meta for each in state["factors"]] == [True, True]
    assert [tuple(each.shape) for each in state["factors"]] == [(12, 12), (8, 8)]
    assert all(each.dim() == 0 and not each.is_meta for each in state["last"]["traces"])
    assert {"optimizer.blocks.0.first.weight.factors.0", "optimizer.blocks.0.first.weight.factors.1"} <= (
        stored["records"].keys()
    )


def test_state_with_gaps_in_memory_is_refused_before_training():
    with pytest.raises(ValueError, match=r"its state 'momentum' is a tensor of shape .+ with gaps in memory"):
        zerolab.ZeroOptimizer(Net(), kept_states.Gaps)


def test_state_is_loaded_into_tensors_of_the_same_strides_alone():
    """What an optimizer has when it loads may lie in rows, where what was saved lies in columns."""
    rows, columns = torch.zeros(3, 4), torch.zeros(4, 3).T
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    each = SimpleNamespace(
        tensor=parameter, span=SimpleNamespace(name="weight"), unit=SimpleNamespace(trainable=True)
    )
    stored = {"weight": {"q": columns.to("meta"), "m": rows.to("meta")}}
    found = allocate_state(each, {"q": rows, "m": rows}, stored)
    assert found["q"].stride() == (1, 3) and found["q"] is not rows and found["m"] is rows
