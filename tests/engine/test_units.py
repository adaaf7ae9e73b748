"""Promise: parameters are grouped into units by where a network uses them, each in exactly one."""

import contextlib
import sys

import cloudpickle
import pytest
import torch
from support.user_models import Block, Net, every_case, outputs
from torch import nn

import zerolab
from zerolab.engine.tensors import tensors_in
from zerolab.engine.units import find_units

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

EVERY = {name: make for named in every_case().values() for name, make in named.items()}


def names(model: nn.Module, **given) -> dict[str, list[str]]:
    return {unit.name: [name for name, _ in unit.parameters] for unit in find_units(model, **given)}


@pytest.mark.parametrize("name", EVERY)
def test_every_parameter_is_in_one_unit_and_in_the_order_of_registration(name: str):
    build, _ = EVERY[name]()
    model = build()
    found = names(model)
    listed = [name for _, parameters in found.items() for name in parameters]
    assert sorted(listed) == sorted(name for name, _ in model.named_parameters())
    order = [name for name, _ in model.named_parameters()]
    assert all(
        [order.index(n) for n in mine] == sorted(order.index(n) for n in mine) for mine in found.values()
    )
    assert all(found.values())


def test_the_children_of_the_outermost_containers_are_the_units_and_the_rest_is_the_root():
    found = names(Net())
    assert list(found) == ["blocks.0", "blocks.1", "blocks.2", "root"]
    assert found["root"] == ["before.weight", "before.bias", "after.weight", "after.bias"]
    assert found["blocks.1"] == [f"blocks.1.{n}" for n, _ in Block().named_parameters()]


def test_nested_containers_do_not_split_a_block():
    model = nn.Sequential(nn.Sequential(Block(), nn.Sequential(Block(), Block())), nn.ReLU(), Block())
    assert list(names(model)) == ["0", "2"]


def test_a_list_without_a_forward_gives_its_children_in_its_stead():
    model = nn.Module()
    model.stages = nn.ModuleList(
        [
            nn.ModuleList([Block(), Block()]),
            nn.ModuleDict({"a": Block()}),
            nn.ModuleList([nn.ModuleList([Block()])]),
        ]
    )
    assert list(names(model)) == ["stages.0.0", "stages.0.1", "stages.1.a", "stages.2.0.0"]


def test_what_has_no_forward_to_enter_by_belongs_to_the_root():
    model = Net()
    model.tables = nn.ModuleList([nn.ParameterList([torch.ones(2)]), nn.ParameterDict({"a": torch.ones(2)})])
    assert "tables.0.0" in names(model)["root"] and "tables.1.a" in names(model)["root"]


def test_what_two_units_share_belongs_to_the_root():
    model = Net()
    model.blocks[2].first = model.blocks[0].first
    model.blocks[1].second.bias = model.after.bias = nn.Parameter(torch.zeros(5))
    found = names(model)
    assert {"blocks.0.first.weight", "blocks.0.first.bias", "blocks.1.second.bias"} <= set(found["root"])
    assert found["blocks.0"] == ["blocks.0.second.weight", "blocks.0.second.bias"]


def test_one_block_in_several_places_is_one_unit():
    model = Net()
    model.blocks = nn.ModuleList([Block()] * 3)
    assert list(names(model)) == ["blocks.0", "root"]
    model.again = nn.ModuleList([model.blocks[0], Block()])
    assert list(names(model)) == ["blocks.0", "again.1", "root"]


def test_a_model_without_containers_is_one_unit():
    assert list(names(nn.Linear(2, 2))) == ["root"]
    assert list(names(nn.Transformer(8, 2, 1, 1, 8))) == [
        "encoder.layers.0", "decoder.layers.0", "root"
    ]  # fmt: skip


def test_units_may_be_given():
    model = Net()
    assert list(names(model, modules=[model.after, model.blocks[1]])) == ["after", "blocks.1", "root"]
    assert list(names(model, modules=[])) == ["root"]
    assert list(names(model, modules=[model.after, model.after])) == ["after", "root"]


def test_units_that_cannot_be_are_refused_with_the_way_out():
    model = Net()
    with pytest.raises(ValueError, match=r"Linear is not a submodule of the Net.*model\.modules\(\)"):
        find_units(model, [nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="'nope' is not a submodule"):
        find_units(model, ["nope"])
    with pytest.raises(ValueError, match=r"Net is the model itself: pass units=\[\]"):
        find_units(model, [model])
    with pytest.raises(ValueError, match=r"'blocks.0.first' lies inside 'blocks.0'"):
        find_units(model, [model.blocks[0], model.blocks[0].first])


def test_tensors_are_found_wherever_they_are_and_once():
    one, two = torch.ones(1), torch.ones(2)
    ring = {"one": one, "none": None, "text": "text", "model": Net()}
    ring["self"] = [ring, (two, {3, 4.5})]
    assert sorted(len(t) for t in tensors_in(ring)) == [1, 2]
    found_in = [
        outputs.Output(one, [two]),
        outputs.SlottedOutput(one),
        outputs.NamedOutput(one, 3),
        outputs.Plain(one),
        outputs.DataclassDict(one),
        {"list": [({one},)]},
    ]
    assert all(next(iter(tensors_in(each))) is one for each in found_in[1:])
    assert len(list(tensors_in(found_in[0]))) == 2


def test_a_long_chain_of_outputs_is_no_recursion_and_no_quadratic_walk():
    node: list = [torch.ones(1)]
    for _ in range(20_000):
        node = [node, {"a": None}]
    assert len(list(tensors_in(node))) == 1


class Named(nn.Module):
    """Blocks and a root with running statistics, frozen ones too, and a block that is called root."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.root = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.blocks = nn.ModuleList(self.block() for _ in range(2))
        self.last = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))
        for module in (self.blocks[1][0], self.blocks[1][1]):
            module.requires_grad_(False)

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, x):
        x = self.root(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def names_of_units(named: bool) -> list[str]:
    model = Named()
    units = [model.root, *model.blocks] if named else None
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, units=units, lr=0.1)
    return [unit.name for unit in optimizer.units]


@pytest.mark.parametrize("named", [False, True])
def test_every_flat_buffer_has_a_name_of_its_own(named: bool):
    """Ranks compare collectives by name. Two of one name would be taken for each other, and wait for ever."""
    (found,) = zerolab.launch(names_of_units, 1, named, timeout=60)
    assert len(found) == len(set(found))
    assert {"root of the model", "blocks.1 (frozen float32)"} <= set(found)


def names_with_three_classes_of_one_name() -> list[str]:
    classes = [type("Mine", (torch.optim.Muon,), {}) for _ in range(3)]
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    rest, *own = ({"params": [layer.weight]} for layer in model)
    own = [group | {"optimizer": each} for group, each in zip(own, classes, strict=True)]
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, params=[rest, *own], units=[], lr=0.1)
    return [unit.name for unit in optimizer.units]


def test_buffers_of_classes_that_have_one_name_have_names_of_their_own():
    (found,) = zerolab.launch(names_with_three_classes_of_one_name, 1, timeout=60)
    assert len(found) == 4 == len(set(found)) and found[:2] == ["root", "root (Mine)"], found


class Refusal(Exception):
    """What a user's hook raises."""


class OfTwoKinds(nn.Module):
    """One unit with two flat buffers; that of the running statistics has its gradients first."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.refusing = False

    def forward(self, x):
        x = self.linear(x)
        if self.refusing:
            x.register_hook(self.refuse)
        return self.norm(x)

    def refuse(self, gradient):
        raise Refusal


def break_off_on_rank_1() -> str:
    torch.manual_seed(0)
    model = OfTwoKinds()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=0, units=[], lr=0.1)
    step = lambda: model(torch.randn(4, 8)).square().sum().backward()
    try:
        step()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.rank == 1:
            model.refusing = True
            with contextlib.suppress(Refusal):
                step()
            model.refusing = False
            model.zero_grad()
        step()
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "accepted"


def test_a_rank_that_has_reduced_one_buffer_more_gets_an_error_and_does_not_wait():
    for said in zerolab.launch(break_off_on_rank_1, 2, backend="gloo", timeout=60):
        assert said.startswith("ranks took different paths")
