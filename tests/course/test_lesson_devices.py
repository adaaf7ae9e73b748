"""Promise: the lessons build their models and batches on the rank's device, so they run unchanged on GPUs.

It holds for every lesson that launches ranks, except one that says that it runs on your CPU.
"""

import re

import pytest
import torch
from support.lessons import NAMES, code_cells, notebook_names, source

import zerolab

ON_DEVICES = [name for name in NAMES if "launch(" in source(name) and "on your CPU" not in source(name)]
TRAINING = [name for name in ON_DEVICES if re.search(r"^def batch\(", source(name), re.MULTILINE)]
FACTORY = re.compile(r"^    .*\btorch\.(?:ones|zeros|empty|arange|tensor)\(.*$", re.MULTILINE)


def test_lessons_are_found():
    assert {"collectives", "data_parallel", "in_the_wild"} <= set(ON_DEVICES)
    assert len(TRAINING) >= 5 and "ranks" not in ON_DEVICES


@pytest.mark.parametrize("name", TRAINING)
def test_models_and_batches_are_on_the_ranks_device(name: str, monkeypatch):
    """The meta device stands for a GPU: what is built on `zerolab.device()` ends up there."""
    monkeypatch.setattr(zerolab, "device", lambda: torch.device("meta"), raising=False)
    names = notebook_names(name)
    for cell in code_cells(name):
        if re.search(r"^def (build|fresh_model|batch)\(|^DATA = |^text = ", cell, re.MULTILINE):
            exec(cell, names)
    assert all(tensor.is_meta for tensor in names["batch"](0, 0))
    make = names.get("fresh_model") or names["build"]
    if not all(tensor.is_meta for tensor in make().parameters()):
        assert left_on_the_cpu(name, make.__name__) == []


def left_on_the_cpu(name: str, make: str) -> list[str]:
    """The lines of functions that use a new model without moving it to the rank's device."""
    pattern = rf"^    (?!return GPT\().*(?:\b{make}\(\)|\bGPT\().*$"
    cells = [cell for cell in code_cells(name) if 'torch.device("meta")' not in cell]
    lines = [line for cell in cells for line in re.findall(pattern, cell, re.MULTILINE)]
    return [line for line in lines if ".to(zerolab.device())" not in line]


@pytest.mark.parametrize("name", ON_DEVICES)
def test_ranks_make_their_tensors_on_their_device(name: str):
    """A factory of torch inside a function names the device, and batches come from the lesson's `batch`."""
    lines = [line for cell in code_cells(name) for line in FACTORY.findall(cell)]
    assert [line for line in lines if "device=" not in line] == []
    assert len(re.findall(r"\b(?:text|DATA)\.batch\(", source(name))) == (name in TRAINING)
