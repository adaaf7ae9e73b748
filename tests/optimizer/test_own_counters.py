"""Promise: an optimizer that counts its own steps, lowers its learning rate itself or adds state late trains
as in a single process, and what it writes into its parameter groups is shown and saved.
"""

import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from support import subjects
from support.layers import parameters, same, step, three_layers
from support.odd_optimizers import CountingAdam, LateState, OwnSchedule
from support.together import update_together

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

PLACES = ["self", "group", "tensor in the group", "group, made in step"]
STEPS = 4


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def kinds() -> list[tuple[type, dict]]:
    return [*((CountingAdam, {"where": where}) for where in PLACES), (OwnSchedule, {}), (LateState, {})]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_single_processs_bits_at_every_stage(world_size: int):
    """A conv net with a parameter that nobody uses, and one that some ranks use."""

    def differing() -> list[tuple]:
        found = []
        for kind, keywords in kinds():
            whole = subjects.train_replicas("patchwork", world_size, kind, STEPS, **keywords)[0]
            for stage in range(4):
                run, _ = subjects.train_sharded("patchwork", stage, kind, STEPS, **keywords)
                found += [] if subjects.same(run, whole) else [(kind.__name__, keywords, stage)]
        return found

    assert zerolab.launch(differing, world_size) == [[]] * world_size


@pytest.mark.parametrize("precision", ["mixed", "mixed_fp32_grads"])
@pytest.mark.parametrize("where", PLACES)
def test_in_mixed_precision_where_a_unit_is_updated_in_batches(where: str, precision: str):
    report = zerolab.verify(2, 2, optimizer_class=CountingAdam, precision=precision, where=where)
    assert report.bit_identical


USED = [slice(None), slice(0, 2), slice(0, 2), slice(1, 3), slice(None)]


@pytest.mark.parametrize("where", PLACES)
def test_steps_are_counted_where_none_of_a_units_parameters_is_used(where: str):
    def train(stage: int) -> tuple:
        plain, model = three_layers(), three_layers()
        expected = CountingAdam(plain.parameters(), where=where)
        optimizer = zerolab.ZeroOptimizer(model, CountingAdam, stage=stage, where=where)
        for number, layers in enumerate(USED):
            step(expected, plain, number, layers)
            step(optimizer, model, number, layers)
        optimizer.zero_grad()
        expected.zero_grad()
        optimizer.step()  # nobody used anything
        expected.step()
        step(expected, plain, 9)
        step(optimizer, model, 9)
        return same(parameters(model, optimizer), plain.parameters())

    for stage in (0, 3):
        assert zerolab.launch(train, 2, stage) == [True, True]


@pytest.mark.parametrize("where", PLACES)
def test_a_group_that_is_added_later_finds_the_count_where_it_stands(where: str):
    def train() -> tuple:
        plain, model = three_layers(), three_layers()
        expected = CountingAdam(plain[1].parameters(), where=where)
        optimizer = zerolab.ZeroOptimizer(
            model, CountingAdam, stage=3, params=model[1].parameters(), where=where
        )
        for number in range(5):
            if number == 2:
                expected.add_param_group({"params": [*plain[0].parameters(), *plain[2].parameters()]})
                optimizer.add_param_group({"params": [*model[0].parameters(), *model[2].parameters()]})
            step(expected, plain, number)
            step(optimizer, model, number)
        return same(parameters(model, optimizer), plain.parameters())

    assert zerolab.launch(train, 2) == [True, True]


def test_a_skipped_step_is_not_counted():
    def train() -> tuple:
        model = three_layers()
        optimizer = zerolab.ZeroOptimizer(model, CountingAdam, precision="mixed_fp16", where="group")
        optimizer.loss_scale.value = 2.0**40
        step(optimizer, model, 0)
        skipped = optimizer.param_groups[0]["count"]
        optimizer.loss_scale.value = 1.0
        step(optimizer, model, 1)
        return skipped, optimizer.param_groups[0]["count"], [o.count for o in optimizer.local.optimizers]

    for skipped, counted, inner in zerolab.launch(train, 2):
        assert (skipped, counted) == (0, 1) and set(inner) == {1}


@pytest.mark.parametrize("where", ["group", "tensor in the group", "group, made in step"])
def test_a_count_is_saved_and_goes_on_at_another_size(where: str, tmp_path: Path):
    """As torch does it: a count in ``self`` is in no state_dict."""

    def train(stage: int, numbers: range, saving: bool) -> tuple:
        model = three_layers()
        optimizer = zerolab.ZeroOptimizer(model, CountingAdam, stage=stage, where=where)
        if not saving:
            zerolab.load(optimizer, tmp_path)
        for number in numbers:
            step(optimizer, model, number)
        if saving:
            zerolab.save(optimizer, tmp_path)
        return parameters(model, optimizer)

    plain = three_layers()
    expected = CountingAdam(plain.parameters(), where=where)
    for number in range(5):
        step(expected, plain, number)
    zerolab.launch(train, 2, 1, range(3), True)
    assert all(same(found, plain.parameters()) for found in zerolab.launch(train, 1, 3, range(3, 5), False))


def test_a_state_dict_takes_the_optimizer_back():
    def train() -> tuple:
        model = three_layers()
        optimizer = zerolab.ZeroOptimizer(
            model, CountingAdam, stage=2, precision="mixed", where="group, made in step"
        )
        step(optimizer, model, 0)
        saved = {key: value for key, value in optimizer.state_dict().items()}
        kept = {number: state["m"].clone() for number, state in saved["state"].items()}
        groups = [dict(group) for group in saved["param_groups"]]
        step(optimizer, model, 1)
        optimizer.load_state_dict(saved | {"param_groups": groups})
        shown = optimizer.param_groups[0]["made"]
        return shown, [o.param_groups[0]["made"] for o in optimizer.local.optimizers], sorted(kept)

    for shown, inner, numbers in zerolab.launch(train, 2):
        assert shown == 1 and set(inner) == {1} and numbers == [0, 1, 2, 3, 4, 5]


def test_state_is_found_by_each_slices_tensor():
    def look() -> tuple:
        model = three_layers()
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=3, precision="mixed")
        before = len(optimizer.state), optimizer.slices[0].tensor in optimizer.state
        step(optimizer, model, 0)
        state = optimizer.state
        shapes = [state[each.tensor]["exp_avg"].shape == each.tensor.shape for each in optimizer.slices]
        state[optimizer.slices[0].tensor] = {"changed": 1}
        inner = [o.state.get(optimizer.slices[0].tensor) for o in optimizer.local.optimizers]
        names = [each.name for each in optimizer.updates.of_groups]
        return before, all(shapes), len(state), {"changed": 1} in inner, names

    assert zerolab.launch(look, 2) == [((0, False), True, 6, True, ["Adam"])] * 2


def test_a_batch_of_converted_gradients_is_no_larger_than_the_largest_slice():
    def look() -> list:
        update_together(False)
        optimizer = zerolab.ZeroOptimizer(subjects.deep_gpt(), torch.optim.Adam, precision="mixed")
        largest = max(each.tensor.numel() for each in optimizer.slices)
        held = [[p for g in o.param_groups for p in g["params"]] for o in optimizer.local.optimizers]
        assert sorted(id(p) for each in held for p in each) == sorted(
            id(each.tensor) for each in optimizer.slices
        )
        return [sum(p.numel() for p in each) <= largest for each in held]

    for found in zerolab.launch(look, 2):
        assert all(found) and len(found) > 6, "a unit has more than one batch"


def test_small_units_are_updated_in_one_call_and_sent_in_the_order_of_a_forward():
    def look() -> tuple:
        model, calls = subjects.deep_gpt(), []
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, precision="mixed")
        (only,) = optimizer.local.optimizers
        only.register_step_post_hook(lambda *_: calls.append(len(only.state)))
        model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)).backward()
        optimizer.step()
        units = lambda op: [event.unit for event in optimizer.trace.step(0) if event.op == op]
        blocks = [unit.name for unit in optimizer.units if unit.name != "root"]
        in_order = units("update") == units("all_gather") == ["root", *blocks]
        return calls, in_order, len(optimizer.slices)

    for calls, in_order, slices in zerolab.launch(look, 2):
        assert calls == [slices] and in_order
