"""Promise: the lessons build their models and batches on the rank's device, so they run unchanged on GPUs.

It holds for every lesson that launches ranks, except one that says that it runs on your CPU.
"""

import re

import pytest
import torch
from support.lessons import NAMES, code_cells, notebook_names, source

import zerolab
from zerolab.course.lessons.in_the_wild import sharded
from zerolab.course.lessons.incident_room import own_tests, room, runs, stage_trial, trainings

META = torch.device("meta")
ON_DEVICES = [name for name in NAMES if "launch(" in source(name) and "on your CPU" not in source(name)]
TRAINING = [name for name in ON_DEVICES if re.search(r"^def batch\(", source(name), re.MULTILINE)]
FACTORY = re.compile(r"^    .*\btorch\.(?:ones|zeros|empty|arange|tensor)\(.*$", re.MULTILINE)


def test_lessons_are_found():
    assert {"collectives", "data_parallel", "in_the_wild"} <= set(ON_DEVICES)
    assert len(TRAINING) >= 5 and "ranks" not in ON_DEVICES


@pytest.mark.parametrize("name", TRAINING)
def test_models_and_batches_are_on_the_ranks_device(name: str, monkeypatch):
    """The meta device stands for a GPU: what is built on `zerolab.device()` ends up there."""
    monkeypatch.setattr(zerolab, "device", lambda: META, raising=False)
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
    pattern = rf"^    (?!return models\.GPT\().*(?:\b{make}\(\)|\bGPT\().*$"
    cells = [cell for cell in code_cells(name) if not re.search(r"device\W+meta", cell)]
    lines = [line for cell in cells for line in re.findall(pattern, cell, re.MULTILINE)]
    return [line for line in lines if ".to(zerolab.device())" not in line]


@pytest.mark.parametrize("name", ON_DEVICES)
def test_ranks_make_their_tensors_on_their_device(name: str):
    """A factory of torch inside a function names the device, and batches come from the lesson's `batch`."""
    lines = [line for cell in code_cells(name) for line in FACTORY.findall(cell)]
    assert [line for line in lines if "device=" not in line] == []
    assert len(re.findall(r"\b(?:text|DATA)\.batch\(", source(name))) == (name in TRAINING)


CASE = room.Case(2, micro_batches=2, uneven=True, by_name=True)
MADE = {
    "what lesson 08's check trains": lambda: [*sharded._model().parameters(), sharded._batch(0)],
    "where the tickets' jobs start": lambda: [room.start(), *room.named(CASE, room.start()).values()],
    "their samples": lambda: [part for each in room.batches(CASE, 1) for part in (each.inputs, each.targets)],
    "the files that a job resumes from": lambda: runs.tree_map(runs._on_device, ([torch.ones(2)], 5))[0],
    "what the reader's test trains": lambda: [*trainings._model().parameters(), *trainings._batch(0, 0, 0)],
    "the batches of the reader's stages": lambda: stage_trial._tokens(0, 0),
}


@pytest.mark.parametrize("made", MADE)
def test_lessons_08_and_09_compute_on_the_ranks_device(made: str, monkeypatch):
    monkeypatch.setattr(zerolab, "device", lambda: META, raising=False)
    assert {tensor.device for tensor in MADE[made]()} == {META}


def test_a_stage_of_the_reader_is_tried_on_the_ranks_device_beside_its_reference(monkeypatch):
    """The trial is stopped where it builds the optimizer."""

    class Built(Exception):
        pass

    def optimizer(model, *args, **kwargs):
        raise Built({parameter.device for parameter in model.parameters()})

    monkeypatch.setattr(zerolab, "device", lambda: META, raising=False)
    monkeypatch.setattr(stage_trial, "install", lambda *args: [])
    monkeypatch.setattr(stage_trial, "ZeroOptimizer", optimizer)
    with pytest.raises(Built, match="meta"):
        stage_trial.trial(object, 1)


@pytest.mark.parametrize("module, work", [(own_tests, "_try"), (stage_trial, "trials")])
def test_what_is_compared_bit_for_bit_is_computed_deterministically(module, work: str, monkeypatch):
    """On a GPU the ranks' gradients are added in rank order only then."""
    asked = []
    monkeypatch.setattr(module, "compute_deterministically", lambda: asked.append(1) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        getattr(module, work)({}) if work == "trials" else own_tests._try(len, False)
    assert asked


def test_the_readers_test_gets_parameters_that_can_be_compared():
    """Each rank's are on a device of its own, so they come to the test on the CPU."""
    flat = trainings._flat(trainings._model())
    assert flat.device == torch.device("cpu") and "cpu" in trainings._flat.__code__.co_names
