"""Promise: the options of a group that names its class are that class's keywords, and nobody else's."""

import sys

import cloudpickle
import pytest
import torch
from support import training, whole_updates
from support.user_models import Net, squares
from support.whole_updates import Asks, Orthogonal, Signed, SignedByElement

import zerolab

for module in (sys.modules[__name__], whole_updates):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def groups(optimizer_class: type, **options):
    """The matrices by the class, and the rest by the ZeroOptimizer's own."""

    def of(model):
        parameters = list(model.parameters())
        matrices = {"params": [p for p in parameters if p.dim() == 2], "optimizer": optimizer_class}
        return [{"params": [p for p in parameters if p.dim() != 2]}, matrices | options]

    return of


def two_of_one_class(model):
    first, *others = (p for p in model.parameters() if p.dim() == 2)
    rest = [p for p in model.parameters() if p.dim() != 2]
    own = {"optimizer": Signed, "lr": 0.02}
    return [{"params": rest}, own | {"params": [first], "sign": -1.0}, own | {"params": others}]


@pytest.mark.parametrize(
    "params",
    [
        groups(Signed, lr=0.02, sign=-1.0),
        groups(SignedByElement, lr=0.02, sign=-1.0),
        groups(torch.optim.AdamW, lr=0.02),  # the ZeroOptimizer's own class, without its keywords
        two_of_one_class,
    ],
    ids=["by parameter", "elementwise", "the same class", "two of one class"],
)
def test_each_group_is_updated_as_by_an_optimizer_of_its_own(params):
    training.assert_same_bits(lambda: (Net, squares), 2, (1, 3), params=params)


@pytest.mark.parametrize(
    "params",
    [groups(torch.optim.AdamW, lr=0.02), groups(Signed, lr=0.02, sign=-1.0)],
    ids=["AdamW", "Signed"],
)
def test_verify_reads_the_groups_in_the_same_way(params):
    assert zerolab.verify(2, 2, optimizer_class=torch.optim.AdamW, lr=0.1, params=params).ok


def said(action) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def build(params, **settings) -> zerolab.ZeroOptimizer:
    torch.manual_seed(0)
    return zerolab.ZeroOptimizer(Net(), torch.optim.AdamW, params=params, **settings)


@pytest.mark.parametrize(
    "params, message",
    [
        (groups(torch.optim.Muon, learning_rate=0.1), "Muon has no keyword learning_rate: its keywords are"),
        (
            zerolab.matrices_by(torch.optim.Muon, lr=0.1, betas=(0.9, 0.99)),
            "Muon has no keyword betas: its keywords are lr, weight_decay, momentum",
        ),
        (groups(Signed), "Signed.__init__() missing 1 required positional argument: 'lr'"),
    ],
)
def test_a_misspelt_or_missing_keyword_is_a_type_error_that_names_the_group(params, message: str):
    (found,) = zerolab.launch(lambda: said(lambda: build(params)), 1, timeout=60)
    assert found.startswith(f"TypeError: parameter group 1: {message}")


def test_a_group_shows_what_its_class_keeps_there():
    look = lambda: list(build(groups(Signed, lr=0.02, sign=-1.0)).param_groups[1])
    assert zerolab.launch(look, 1, timeout=60) == [["params", "lr", "momentum", "weight_decay"]]


def test_an_entry_that_the_class_asks_for_in_each_group_is_no_mistake():
    def look():
        return build(groups(Asks, strength=0.5)).param_groups[1]

    (group,) = zerolab.launch(look, 1, timeout=60)
    assert group["strength"] == 0.5 and group["lr"] == 0.01


def add_a_group() -> tuple[dict, dict, str]:
    """First the matrices by Signed alone; then the rest, and a group that has no parameters."""
    model = Net()
    biases = [p for p in model.parameters() if p.dim() != 2]
    some = [groups(Orthogonal, momentum=0.5)(model)[1], {"params": biases[:1]}]
    optimizer = zerolab.ZeroOptimizer(model, SignedByElement, params=some, lr=0.3)
    later = {"params": biases[1:2], "lr": 0.1}
    optimizer.add_param_group(later)
    optimizer.add_param_group({"params": [], "optimizer": torch.optim.SGD, "lr": 0.7})
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    optimizer.param_groups[3]["lr"] = 0.8
    optimizer.step()
    without = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return optimizer.defaults, without[2], without[3]["lr"]


def test_an_added_group_gets_the_options_of_its_class_alone():
    for defaults, added, lr in zerolab.launch(add_a_group, 2, timeout=60):
        assert added == {"lr": 0.1} and lr == 0.8
        assert defaults.keys() == {"lr"}


def schedule() -> str:
    optimizer = build(groups(torch.optim.Muon, lr=0.02))
    return said(lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.02], total_steps=10))


def test_a_scheduler_that_asks_for_an_option_which_one_class_has_not_says_so():
    (found,) = zerolab.launch(schedule, 1, timeout=60)
    assert "optimizer must support momentum or beta1" in found
