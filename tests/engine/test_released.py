"""Promise: a model and its optimizer are freed when nobody uses them any more, so the next ones have room."""

import gc
import sys
import time
import weakref

import cloudpickle
import pytest
import torch
from support.trained import on_two_ranks
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


def train_and_let_go(stage: int, precision: str, until: str) -> list[str]:
    """What of a training is still there after its last reference is gone."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=stage, precision=precision)
    loss = model(torch.ones(2, 4)).sum()
    if until != "forward":
        loss.backward()
    if until == "step":
        optimizer.step()
    parts = {"model": model, "parameter": model[0].weight, "optimizer": optimizer, "engine": optimizer.engine}
    parts |= {"flat unit": optimizer.engine.flats[0], "gradients": optimizer.engine.flats[0].grads}
    references = {name: weakref.ref(part) for name, part in parts.items()}
    del model, optimizer, loss, parts
    deadline = time.monotonic() + 10
    while left := [name for name, reference in references.items() if reference() is not None]:
        gc.collect()  # the thread that gathers has the last references until it is done
        if time.monotonic() > deadline:
            break
    return left


@pytest.mark.parametrize("until", ["forward", "backward", "step"])
@pytest.mark.parametrize("precision", ["fp32", "mixed"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_is_left_of_a_model_and_its_optimizer(stage: int, precision: str, until: str):
    assert on_two_ranks(train_and_let_go, stage, precision, until) == [[], []]


def train_on_without_the_optimizer(stage: int) -> bool:
    """The model alone keeps the hooks that a backward pass needs."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=stage).engine
    gc.collect()
    model(torch.ones(2, 4)).sum().backward()
    return all(bool(flat.grads.reduced.any()) for flat in engine.flats)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_hooks_live_as_long_as_the_model(stage: int):
    assert on_two_ranks(train_on_without_the_optimizer, stage) == [True, True]
