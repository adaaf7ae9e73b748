"""A frozen unit at stage 3 is freed in backward, once the gradient of its input is computed."""

import sys

import cloudpickle
import torch
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


def whole_at_the_end_of_backward() -> int:
    """How many of five frozen units are whole when the gradient has passed through all of them."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    model[1:].requires_grad_(False)
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=3, prefetch=0)
    frozen = [flat for run in optimizer.engine.units for flat in run.flats if not flat.all_require_grad]
    assert len(frozen) == 5
    counts: list[int] = []
    first = model[0](torch.ones(2, 8))
    first.register_hook(lambda gradient: counts.append(sum(flat.whole for flat in frozen)))
    model[1:](first).sum().backward()
    return counts[0]


def test_frozen_units_are_freed_one_by_one():
    assert max(zerolab.launch(whole_at_the_end_of_backward, 2, timeout=60)) <= 1
