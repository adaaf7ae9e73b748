"""Promise: an optimizer that counts its own steps, lowers its learning rate itself or adds state late trains
as in a single process, and what it writes into its parameter groups is shown and saved.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
import torch
from support import subjects
from support.odd_optimizers import CountingAdam, LateState, OwnSchedule
from torch import nn

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


def step(optimizer: torch.optim.Optimizer, model: "Layers", number: int, layers: slice = slice(None)):
    """A step on a few of the layers."""
    optimizer.zero_grad()
    drawn = torch.randn(2, 4, generator=torch.Generator().manual_seed(number))
    loss = model(drawn, layers).float().square().mean()
    (optimizer.scale(loss) if hasattr(optimizer, "scale") else loss).backward()
    optimizer.step()


class Layers(nn.Sequential):
    def forward(self, x: torch.Tensor, layers: slice) -> torch.Tensor:
        for layer in list(self)[layers]:
            x = layer(x)
        return x


def three_layers() -> Layers:
    torch.manual_seed(0)
    return Layers(*(nn.Linear(4, 4) for _ in range(3)))


def parameters(model: nn.Module, optimizer: zerolab.ZeroOptimizer) -> list[torch.Tensor]:
    with optimizer.full_params():
        return [p.detach().clone() for p in model.parameters()]


def same(ours: list[torch.Tensor], theirs) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


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


def test_the_groups_show_what_the_optimizer_wrote():
    def train() -> list:
        model = three_layers()
        groups = [
            {"params": model[0].parameters()},
            {"params": []},
            {"params": model[1].parameters(), "lr": 0.5},
        ]
        optimizer = zerolab.ZeroOptimizer(
            model, CountingAdam, stage=3, params=groups, where="group, made in step"
        )
        for number in range(3):
            step(optimizer, model, number)
        saved = optimizer.state_dict()["param_groups"]
        return [(g["made"], g["lr"], s["made"]) for g, s in zip(optimizer.param_groups, saved, strict=True)]

    assert zerolab.launch(train, 2) == [[(3, 0.01, 3), (3, 0.01, 3), (3, 0.5, 3)]] * 2


def decay(optimizer: torch.optim.Optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)


def test_a_scheduler_and_the_optimizer_may_both_change_a_learning_rate():
    def train() -> tuple:
        run, optimizer = subjects.train_sharded("gpt", 1, OwnSchedule, STEPS, schedule=decay)
        whole = subjects.train_replicas("gpt", 2, OwnSchedule, STEPS, schedule=decay)[0]
        return subjects.same(run, whole), optimizer.param_groups[0]["lr"]

    for equal, lr in zerolab.launch(train, 2):
        assert equal and lr == pytest.approx(0.1 * (0.75 * 0.9) ** STEPS)


@pytest.mark.parametrize("change", ["in place", "anew", "from outside"])
def test_a_learning_rate_in_a_tensor_may_be_changed_in_place(change: str):
    def train() -> tuple:
        plain, model = three_layers(), three_layers()
        rates = torch.tensor(0.1), torch.tensor(0.1)
        expected = torch.optim.SGD(plain.parameters(), lr=rates[0])
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=rates[1])
        for number in range(3):
            step(expected, plain, number)
            step(optimizer, model, number)
            for each, rate in zip((expected, optimizer), rates, strict=True):
                match change:
                    case "in place":
                        each.param_groups[0]["lr"].mul_(0.5)
                    case "anew":
                        each.param_groups[0]["lr"] = torch.tensor(0.1 / (number + 2))
                    case "from outside":
                        rate.mul_(0.5)
        return same(parameters(model, optimizer), plain.parameters())

    assert zerolab.launch(train, 2) == [True, True]


def test_an_option_that_the_user_removes_or_adds_reaches_every_optimizer():
    def train() -> tuple:
        model = three_layers()
        optimizer = zerolab.ZeroOptimizer(model, CountingAdam, where="group, made in step")
        step(optimizer, model, 0)
        optimizer.param_groups[0]["mine"] = [1]
        del optimizer.param_groups[0]["made"]
        step(optimizer, model, 1)
        optimizer.param_groups[0]["mine"].append(2)
        step(optimizer, model, 2)
        groups = [each.param_groups[0] for each in optimizer.local.optimizers]
        return [(group["made"], group["mine"]) for group in [*groups, *optimizer.param_groups]]

    for found in zerolab.launch(train, 2):
        assert len(found) == 4 and set(map(str, found)) == {"(2, [1, 2])"}


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


def two_groups(model: nn.Module) -> list[dict]:
    """Both of them have the defaults, and with these a tensor of the user's."""
    return [{"params": model[0].parameters()}, {"params": model[1:].parameters()}]


def two_groups_with_a_tensor(model: nn.Module) -> list[dict]:
    shared = {"count": torch.zeros(())}
    return [group | shared for group in two_groups(model)]


def start_anew(change: str, count: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """What a user may do with a tensor that the optimizer counts in."""
    groups = optimizer.param_groups
    match change:
        case "in place":
            count.zero_()
        case "a new tensor":
            groups[0]["count"] = torch.zeros(())
        case "a new tensor in all groups":
            for group, new in zip(groups, [torch.zeros(())] * len(groups), strict=True):
                group["count"] = new


def with_a_count_of_the_users(groups: Callable, stage: int, change: str = "") -> bool:
    """Whether every step leaves a single process's parameters, counts, and count in the user's own tensor."""
    models, counts = (three_layers(), three_layers()), (torch.zeros(()), torch.zeros(()))
    own = [{"where": "tensor in the group", "count": count} for count in counts]
    plain = CountingAdam(groups(models[0]), **own[0])
    sharded = zerolab.ZeroOptimizer(models[1], CountingAdam, stage, params=groups(models[1]), **own[1])
    equal = []
    for number in range(5):
        for each, model, count in zip((plain, sharded), models, counts, strict=True):
            if number == 2:
                start_anew(change, count, each)
            step(each, model, number)
        shown = [[group["count"] for group in each.param_groups] for each in (plain, sharded)]
        equal += [same(parameters(models[1], sharded), models[0].parameters())]
        equal += [same(*shown), torch.equal(*counts)]
    return all(equal)


@pytest.mark.parametrize("groups", [nn.Module.parameters, two_groups, two_groups_with_a_tensor])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_count_in_a_tensor_of_the_users_is_counted_once_a_step(world_size: int, groups: Callable):
    """Once for each group: in a single process they all count in the same tensor."""
    for stage in (1, 3):
        assert zerolab.launch(with_a_count_of_the_users, world_size, groups, stage) == [True] * world_size


@pytest.mark.parametrize("groups", [nn.Module.parameters, two_groups])
@pytest.mark.parametrize("change", ["in place", "a new tensor", "a new tensor in all groups"])
def test_a_count_that_the_user_starts_anew_is_counted_from_there(change: str, groups: Callable):
    for stage in (1, 3):
        assert zerolab.launch(with_a_count_of_the_users, 2, groups, stage, change) == [True, True]


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
        return before, all(shapes), len(state), {"changed": 1} in inner, optimizer.optimizer_class.__name__

    assert zerolab.launch(look, 2) == [((0, False), True, 6, True, "Adam")] * 2


def test_a_batch_of_converted_gradients_is_no_larger_than_the_largest_slice():
    def look() -> list:
        optimizer = zerolab.ZeroOptimizer(subjects.deep_gpt(), torch.optim.Adam, precision="mixed")
        largest = max(each.tensor.numel() for each in optimizer.slices)
        held = [[p for g in o.param_groups for p in g["params"]] for o in optimizer.local.optimizers]
        assert sorted(id(p) for each in held for p in each) == sorted(
            id(each.tensor) for each in optimizer.slices
        )
        return [sum(p.numel() for p in each) <= largest for each in held]

    for found in zerolab.launch(look, 2):
        assert all(found) and len(found) > 6, "a unit has more than one batch"


def test_a_group_added_later_gets_a_default_tensor_as_it_is_by_then():
    def train() -> bool:
        plain, model = three_layers(), three_layers()
        rates = torch.tensor(0.1), torch.tensor(0.1)
        expected = torch.optim.SGD(plain[0].parameters(), lr=rates[0])
        optimizer = zerolab.ZeroOptimizer(
            model, torch.optim.SGD, stage=1, params=model[0].parameters(), lr=rates[1]
        )
        for number in range(4):
            if number == 2:
                expected.add_param_group({"params": plain[1].parameters()})
                optimizer.add_param_group({"params": model[1].parameters()})
            for rate in rates:
                rate.mul_(0.5)
            step(expected, plain, number)
            step(optimizer, model, number)
        return same(parameters(model, optimizer), plain.parameters())

    assert zerolab.launch(train, 2) == [True, True]
