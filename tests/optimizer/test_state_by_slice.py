"""Promise: optimizer.state has the state of a rank's slices, and is never asked in vain for a parameter."""

import collections
import sys
from collections.abc import Callable

import cloudpickle
import pytest
import torch
from support.trained import train_a_step
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def trained(stage: int, offload: str | None) -> zerolab.ZeroOptimizer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].bias.requires_grad_(False)
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=stage, lr=0.1, offload=offload)
    train_a_step(model, optimizer)
    return optimizer


BY_PARAMETER = {
    "read": lambda optimizer, p: optimizer.state[p]["exp_avg"].zero_(),
    "in": lambda optimizer, p: p in optimizer.state,
    "get": lambda optimizer, p: optimizer.state.get(p, {}),
    "pop": lambda optimizer, p: optimizer.state.pop(p, None),
    "setdefault": lambda optimizer, p: optimizer.state.setdefault(p, {}),
}
OF_SLICES = {
    "write": lambda optimizer, p: optimizer.state.update({p: {}}),
    "delete": lambda optimizer, p: optimizer.state.__delitem__(p),
}


def says(action: Callable, *arguments) -> str:
    try:
        return f"it returned {action(*arguments)}"
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("stage, offload", [(0, None), (2, "cpu"), (3, None)])
def test_a_models_parameter_is_refused_with_the_way_to_its_slice(stage: int, offload: str | None):
    def look() -> tuple[list[str], list[bool]]:
        optimizer = trained(stage, offload)
        weight, frozen = optimizer.model[0].weight, optimizer.model[1].bias
        actions = BY_PARAMETER if offload else BY_PARAMETER | OF_SLICES
        said = [says(act, optimizer, p) for act in actions.values() for p in (weight, frozen)]
        unrelated = nn.Parameter(torch.ones(1))
        return said, [
            *(each.tensor in optimizer.state for each in optimizer.slices),
            unrelated in optimizer.state,
            optimizer.state.get(unrelated) is not None,
        ]

    for said, found in zerolab.launch(look, 2, timeout=60):
        assert all("each rank keeps the state of its slices" in text for text in said)
        assert all("optimizer.state[each.tensor]" in text for text in said)
        assert found == [True] * 3 + [False] * 2


def test_a_new_state_is_refused_and_clear_has_its_effect():
    def look() -> tuple[str, list[torch.Tensor]]:
        optimizer = trained(stage=2, offload=None)
        said = says(setattr, optimizer, "state", collections.defaultdict(dict))
        optimizer.state.clear()
        assert len(optimizer.state) == 0
        train_a_step(optimizer.model, optimizer)
        return said, [p.detach().clone() for p in optimizer.model.parameters()]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].bias.requires_grad_(False)
    plain = torch.optim.Adam(model.parameters(), lr=0.1)
    train_a_step(model, plain)
    plain.state = collections.defaultdict(dict)
    train_a_step(model, plain)
    for said, parameters in zerolab.launch(look, 2, timeout=60):
        assert "optimizer.state.clear()" in said and "optimizer.load_state_dict" in said
        assert all(map(torch.equal, parameters, model.parameters()))
