"""Promise: the lessons build their models and batches on the rank's device, so they run unchanged on GPUs."""

import re

import pytest
import torch
from support.lessons import code_cells, notebook_names, source

import zerolab

TRAINING = ("data_parallel", "zero_stage_1", "zero_stage_2", "zero_stage_3")


@pytest.mark.parametrize("name", TRAINING)
def test_models_and_batches_are_on_the_ranks_device(name: str, monkeypatch):
    """The meta device stands for a GPU: what is built on `zerolab.device()` ends up there."""
    monkeypatch.setattr(zerolab, "device", lambda: torch.device("meta"), raising=False)
    names = notebook_names(name)
    for cell in code_cells(name):
        if re.search(r"^def (build|fresh_model|batch)\(|^DATA = |^text = ", cell, re.MULTILINE):
            exec(cell, names)
    model = (names.get("fresh_model") or names["build"])()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *names["batch"](0, 0)))


@pytest.mark.parametrize("name", (*TRAINING, "collectives"))
def test_ranks_make_their_tensors_on_their_device(name: str):
    """A factory of torch inside a function names the device, and batches come from the lesson's `batch`."""
    for cell in code_cells(name):
        lines = re.findall(r"^    .*\btorch\.(?:ones|zeros|empty|arange|tensor)\(.*$", cell, re.MULTILINE)
        assert [line for line in lines if "device=" not in line] == []
    assert len(re.findall(r"\b(?:text|DATA)\.batch\(", source(name))) == (name != "collectives")
