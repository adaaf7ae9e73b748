"""Promise: where ranks build their model with other buffers, a warning names the first."""

import sys
import warnings

import cloudpickle
import pytest
import torch
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


class RandomFeatures(nn.Module):
    def __init__(self, seeded: bool):
        super().__init__()
        if seeded:
            torch.manual_seed(0)
        self.linear = nn.Linear(8, 2)
        self.register_buffer("frequencies", torch.randn(3, 8))

    def forward(self, x):
        return self.linear(torch.cos(x @ self.frequencies))


def warned(seeded: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        zerolab.ZeroOptimizer(RandomFeatures(seeded), torch.optim.SGD, lr=0.1)
    return [str(each.message) for each in found]


@pytest.mark.parametrize("seeded", [True, False])
def test_buffers_that_ranks_drew_for_themselves_are_named_on_rank_0(seeded: bool):
    first, second = zerolab.launch(warned, 2, seeded, timeout=60)
    assert second == [] and len(first) == (0 if seeded else 1)
    assert all("ranks disagree about the buffers" in each and "frequencies" in each for each in first)
