"""Promise: at stage 3 a block that returns a part of its parameters' memory is refused, before it is read."""

import sys

import cloudpickle
import pytest
import torch
from support.numbered import outcome
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

REFUSED = "RuntimeError: a module of unit blocks.0 returns a tensor in the memory of its parameters"
WAYS = {
    "expand": lambda prompt: prompt.expand(2, -1, -1),
    "slice": lambda prompt: prompt[:1],
    "detach": lambda prompt: prompt.detach(),
    "in a dict": lambda prompt: {"prompt": [prompt.mT]},
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Prompt(nn.Module):
    """Learned inputs, as of prompt tuning."""

    def __init__(self, give):
        super().__init__()
        self.prompt, self.give = nn.Parameter(torch.ones(1, 3, 4)), give

    def forward(self):
        return self.give(self.prompt)


class Prompted(nn.Module):
    def __init__(self, give):
        super().__init__()
        self.blocks = nn.ModuleList([Prompt(give), nn.Linear(4, 4)])

    def forward(self, x):
        prompt = self.blocks[0]()
        return self.blocks[1](x + (prompt["prompt"][0].mT if isinstance(prompt, dict) else prompt))


def use(stage: int, way: str, cloned: bool, whole: bool, evaluated: bool) -> str:
    """On a rank: what a forward and backward say, or a forward in an evaluation."""
    torch.manual_seed(0)
    give = (lambda prompt: WAYS[way](prompt).clone()) if cloned else WAYS[way]
    model = Prompted(give)
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)

    def run() -> None:
        with torch.set_grad_enabled(not evaluated):
            loss = model(torch.ones(2, 3, 4)).sum()
        if not evaluated:
            loss.backward()

    if not whole:
        return outcome(run)
    with optimizer.full_params():
        return outcome(run)


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_refused_by_the_units_name(way: str, evaluated: bool):
    for said in zerolab.launch(use, 2, 3, way, False, False, evaluated, timeout=60):
        assert said.startswith(REFUSED), said


@pytest.mark.parametrize(
    "stage, cloned, whole", [(3, True, False), (3, False, True), (0, False, False), (2, False, False)]
)
def test_a_clone_is_used_and_so_is_a_view_where_nothing_is_freed(stage: int, cloned: bool, whole: bool):
    assert zerolab.launch(use, 2, stage, "expand", cloned, whole, False, timeout=60) == ["done"] * 2
