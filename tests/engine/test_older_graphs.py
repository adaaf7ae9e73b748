"""Promise: backward through a graph older than a step reads the parameters that the step left alone."""

import sys

import cloudpickle
import pytest
import torch
from support.beside_plain import BATCH, Make, differing
from torch import nn

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


class TwoParts(nn.Module):
    """Autograd saves the weights of a convolution themselves, and those of a linear layer as a view."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Sequential(nn.Conv1d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv1d(3, 1, 3, padding=1))

    def forward(self, x):
        return self.first(x).sum(), self.second(x[:, None]).pow(2).sum()


def a_step_for_each_part(make: Make) -> nn.Module:
    model = TwoParts()
    optimizer = make(model, torch.optim.AdamW, lr=0.1)
    for _ in range(2):
        for loss in model(BATCH):  # the second loss goes back through the graph of before the first step
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def a_frozen_encoder(make: Make) -> nn.Module:
    """The gradient of the input is taken after the update of the head."""
    model = TwoParts()
    optimizer = make(model, torch.optim.SGD, lr=0.1)
    sum(model(BATCH)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.second.requires_grad_(False)
    inputs = BATCH[:, None].clone().requires_grad_()
    features = model.second(inputs)
    model.first(features.detach()[:, 0]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    (gradient,) = torch.autograd.grad(features.pow(2).sum(), inputs)
    model.first((inputs.detach() + gradient)[:, 0]).pow(2).sum().backward()
    optimizer.step()
    return model


def an_encoder_in_no_group(make: Make) -> nn.Module:
    """Its graph is kept over several steps of the head."""
    model = TwoParts()
    optimizer = make(model, torch.optim.SGD, lr=0.1, params=list(model.first.parameters()))
    features = model.second(BATCH[:, None])[:, 0]
    for _ in range(3):
        model.first(features).pow(2).sum().backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("loop", [a_step_for_each_part, a_frozen_encoder, an_encoder_in_no_group])
def test_parameters_that_were_not_updated_are_read_as_they_are(loop, stage: int):
    assert differing(loop, stage) == set()
