"""Promise: an edit of optimizer.param_groups has the effect that it has in torch.optim, or is refused."""

import re
import sys
from collections.abc import Callable

import cloudpickle
import pytest
import torch
from support.numbered import outcome
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def a_group_each(model: nn.Sequential) -> list[dict]:
    return [{"params": model[0].parameters(), "lr": 0.1}, {"params": list(model[2].parameters()), "lr": 0.01}]


def backward(model: nn.Module, step: int) -> None:
    torch.manual_seed(step)
    model(torch.randn(3, 4)).square().mean().backward()


def take_out(optimizer) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]


def move(optimizer) -> None:
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())


def add(optimizer) -> None:
    optimizer.param_groups[1]["params"].append(nn.Parameter(torch.ones(5)))


def turn_around(optimizer) -> None:
    optimizer.param_groups[1]["params"].reverse()


def swap_groups(optimizer) -> None:
    optimizer.param_groups.reverse()


def new_list(optimizer) -> None:
    first, second = optimizer.param_groups
    optimizer.param_groups = [first | {"params": second["params"]}, second | {"params": []}]


def delete(optimizer) -> None:
    del optimizer.param_groups[1]


def append(optimizer) -> None:
    optimizer.param_groups.append({"params": [], "lr": 0.1})


EDITS = {
    take_out: "parameter group 0 lacks 0.weight, which it was built with",
    move: "parameter group 0 lacks 0.bias, which it was built with",
    add: r"parameter group 1 has a tensor of shape \(5,\), which it was not built with",
    turn_around: "parameter group 1 has its parameters in another order",
    swap_groups: "parameter group 0 lacks 0.weight, 0.bias",
    new_list: "parameter group 0 lacks 0.weight, 0.bias",
    delete: "optimizer.param_groups has 1 groups, and the optimizer was built with 2",
    append: "optimizer.param_groups has 3 groups, and the optimizer was built with 2",
}
USES = {
    "step": lambda optimizer: optimizer.step(),
    "clip": lambda optimizer: optimizer.clip_grad_norm_(1.0),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "save": lambda optimizer: zerolab.save(optimizer, "never written"),
}


@pytest.mark.parametrize("stage", (0, 3))
def test_groups_with_other_parameters_are_refused_before_any_parameter_changes(stage: int):
    def train(edit: Callable, use: Callable) -> str:
        model = two_layers()
        groups = a_group_each(model)
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=stage, params=groups)
        backward(model, 0)
        before = [unit.shard.clone() for unit in optimizer.units]
        edit(optimizer)
        with pytest.raises(RuntimeError) as caught:
            use(optimizer)
        assert all(map(torch.equal, before, (unit.shard for unit in optimizer.units)))
        return str(caught.value)

    def every() -> dict[str, str]:
        steps = {edit.__name__: train(edit, USES["step"]) for edit in EDITS}
        return steps | {name: train(take_out, use) for name, use in USES.items()}

    (said,) = zerolab.launch(every, 1, timeout=60)
    for edit, message in EDITS.items():
        assert re.search(message, said[edit.__name__])
    for name in USES:
        assert "parameter group 0 lacks 0.weight" in said[name]
    for text in said.values():
        assert "optimizer.add_param_group" in text and "requires_grad_(False)" in text
        assert "build the model and a ZeroOptimizer anew" in text


def test_groups_that_one_rank_edits_are_refused_on_all():
    def train() -> None:
        model = two_layers()
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, params=a_group_each(model), lr=0.1)
        backward(model, 0)
        if optimizer.rank == 1:
            take_out(optimizer)
        optimizer.step()

    with pytest.raises(zerolab.WorkerError, match=r"rank 1.*(?s:.)*parameter group 0 lacks 0.weight"):
        zerolab.launch(train, 2, timeout=60)


def through_own_list(optimizer, groups: list[dict], step: int) -> None:
    groups[0]["lr"] = 0.1 / (step + 1)


def through_added_group(optimizer, groups: list[dict], step: int) -> None:
    groups[1]["lr"] = 0.01 / (step + 1)


def through_new_dicts(optimizer, groups: list[dict], step: int) -> None:
    optimizer.param_groups = [{**group, "lr": group["lr"] / 2} for group in optimizer.param_groups]


@pytest.mark.parametrize("change", (through_own_list, through_added_group, through_new_dicts))
@pytest.mark.parametrize("stage", (1, 3))
def test_what_is_written_to_a_users_own_dict_counts_as_in_torch(change: Callable, stage: int):
    def train(sharded: bool) -> tuple[list[torch.Tensor], list[list[str]]]:
        model = two_layers()
        groups = a_group_each(model)
        if sharded:
            keywords = {"stage": stage, "momentum": 0.9}
            optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, params=groups[:1], **keywords)
        else:
            optimizer = torch.optim.SGD(groups[:1], momentum=0.9)
        optimizer.add_param_group(groups[1])
        for step in range(3):
            change(optimizer, groups, step)
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        keys = [sorted(group) for group in groups]
        if not sharded:
            return [p.detach() for p in model.parameters()], keys
        with optimizer.full_params():
            return [p.detach().clone() for p in model.parameters()], keys

    ((sharded, keys),), (plain, expected) = zerolab.launch(train, 1, True, timeout=60), train(False)
    assert all(map(torch.equal, sharded, plain)) and keys == expected


def test_a_group_with_an_optimizer_of_its_own_is_copied():
    """Its class and keywords are taken out of it, and the user may need them again."""

    def build() -> list[str]:
        model = two_layers()
        given = {"params": list(model.parameters()), "optimizer": torch.optim.SGD, "momentum": 0.9}
        zerolab.ZeroOptimizer(model, torch.optim.Adam, params=[given])
        return sorted(given)

    assert zerolab.launch(build, 1, timeout=60) == [["momentum", "optimizer", "params"]]


@pytest.mark.parametrize("own", (False, True))
@pytest.mark.parametrize("stage", (0, 3))
def test_a_group_of_a_module_that_was_added_later_is_refused_and_changes_nothing(stage: int, own: bool):
    def train(failing: bool) -> tuple[str, list[torch.Tensor]]:
        model = two_layers()
        inner = list(model[0].parameters())
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, params=inner, lr=0.1)
        said = ""
        if failing:
            model.add_module("late", nn.Linear(4, 4))
            group = {"params": [*model[2].parameters(), *model.late.parameters()], "lr": 1.0}
            with pytest.raises(ValueError) as caught:
                optimizer.add_param_group(group | ({"optimizer": torch.optim.Adam} if own else {}))
            said = str(caught.value)
            del model.late
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.5})
        backward(model, 0)
        optimizer.step()
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
        with optimizer.full_params():
            return said, [p.detach().clone() for p in model.parameters()]

    ((said, parameters),) = zerolab.launch(train, 1, True, timeout=60)
    ((_, expected),) = zerolab.launch(train, 1, False, timeout=60)
    assert "late.weight, late.bias" in said and "after the ZeroOptimizer was built" in said
    assert "build the optimizer when the model is complete" in said
    assert all(map(torch.equal, parameters, expected))


def add_named(stage: int) -> list[str]:
    """On a rank: a group with names, where the others have none, is refused and can be added without."""
    model = two_layers()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=stage, params=model[0].parameters())
    group = {"params": list(model[2].parameters()), "param_names": ["weight", "bias"]}
    refused = outcome(lambda: optimizer.add_param_group(group))
    del group["param_names"]
    return [refused, outcome(lambda: optimizer.add_param_group(group))]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_group_with_names_beside_one_without_is_refused_before_it_is_added(stage: int):
    for refused, added in zerolab.launch(add_named, 2, stage, timeout=60):
        assert refused == (
            "ValueError: a parameter group has 'param_names' and another has none: give all of them names, "
            "or none"
        )
        assert added == "done"
