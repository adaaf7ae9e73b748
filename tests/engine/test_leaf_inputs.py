"""Promise: a leaf that is an input of a frozen block in every step, as a prompt, costs no more later."""

import sys

import cloudpickle
import pytest
import torch
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Block(nn.Module):
    """It has the weights itself, and needs them again after its input has its gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(prompt @ self.second) * torch.tanh(x @ self.first)


class Prompted(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.prompt, self.first = nn.Parameter(torch.randn(1, 8)), nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        for parameter in self.blocks.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, self.prompt)
        return x.square().mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def trained(sharded: bool) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    model, seen = Prompted(), []
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = (
        zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.1)
        if sharded
        else torch.optim.SGD(trainable, lr=0.1)
    )
    for step in range(4):
        model(batch(-1))  # a forward that no backward follows
        model(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if sharded:
            events = optimizer.trace.step(optimizer.trace.step_number - 1)
            gathers = sum(event.op == "all_gather" for event in events)
            seen.append((gathers, len(model.prompt._backward_hooks or ())))
    if not sharded:
        return [parameter.detach() for parameter in trainable], seen
    with optimizer.full_params():
        return [parameter.detach().clone() for parameter in trainable], seen


def test_the_bits_are_those_of_one_process_and_every_step_gathers_alike():
    """Both ranks have one batch, so the mean of two is that of one process."""
    ((expected, _),) = zerolab.launch(trained, 1, False, timeout=60)
    for found, seen in zerolab.launch(trained, 2, True, timeout=60):
        assert all(map(torch.equal, expected, found))
        gathers, hooks = zip(*seen, strict=True)
        assert len(set(gathers[1:])) == 1 and set(hooks) == {0}, seen
