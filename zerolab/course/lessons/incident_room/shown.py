"""Lesson 09: what the trainings that a test asked for show of an engine."""

import re
from collections.abc import Mapping
from functools import partial

import torch

from zerolab import cost, memory
from zerolab.course.lessons.incident_room.trainings import Job, Run, alone

HELD = ("params_bytes", "grads_bytes", "optimizer_bytes")
ITEM = 4  # bytes of an element
Trainings = Mapping[Job, Run]


def call(job: Job) -> str:
    """The training as the reader could write it."""
    return f"train({', '.join(f'{name}={value!r}' for name, value in _settings(job).items())})"


def shown(trainings: Trainings) -> str:
    """The first training that is not as it should be, and in what; "" if none of them shows anything."""
    for job, run in trainings.items():
        # Memory comes first: an engine that keeps too much may send more because of that.
        costs = "; and ".join(filter(None, (_held(job, run), _sent(job, run))))
        if said := _values(run) or costs:
            return f"{call(job)} shows it: {said}"
    return ""


def alike(trainings: Trainings) -> str:
    """The settings that all of the trainings have in common, and that could be others."""
    by_name = {name: {_settings(job)[name] for job in trainings} for name in _settings(next(iter(trainings)))}
    fixed = [f"{name}={values.pop()!r}" for name, values in by_name.items() if len(values) == 1]
    return ", ".join(fixed)


def not_clipped(trainings: Trainings) -> str:
    """The norms that were asked for, where none of them clips anything; "" without clipping, or with it."""
    clipped = {job: run for job, run in trainings.items() if job.clip is not None}
    if any(not torch.equal(run.alone, alone(job._replace(clip=None))) for job, run in clipped.items()):
        return ""
    norms = " and ".join(f"clip={norm:g}" for norm in sorted({job.clip for job in clipped if job.clip}))
    short = "the gradients are never longer than that. Take a smaller norm"
    return f"With {norms} nothing is clipped, in any step: {short}" if norms else ""


def measured(trainings: Trainings, text: str) -> str:
    """What was measured in the last training, where `text` has one of its numbers."""
    numbers = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)}
    if not trainings or not numbers:
        return ""
    job, run = list(trainings.items())[-1]
    where = f". In {call(job)} a right rank"
    if numbers & {float(sent) for sent in run.sent if sent}:
        sends = f"{where} sends {run.sent[0]} bytes, {run.sent[0] / ITEM / run.psi:.3g} times Ψ elements"
        return sends + _of_formula(job, run, numbers)
    held = run.memory[0]
    parts = {name: value for name, value in vars(held).items() if value and name != "peak_bytes"}
    if numbers & {float(value) for value in (held.total_bytes, *parts.values())}:
        listed = ", ".join(f"{name} {value:.0f}" for name, value in parts.items())
        held_there = f"{where} holds {listed}, which make a total_bytes of {held.total_bytes:.0f}"
        return held_there + _of_states(job, run, numbers)
    return ""


def _of_formula(job: Job, run: Run, numbers: set[float]) -> str:
    """What was left out of the formula, where a number is what it gives without that."""
    volume = partial(cost.communication_volume, run.psi, job.stage)
    right = volume(job.micro_batches, reduce_each=True)
    short = {
        "reduce_each=True": ITEM * volume(job.micro_batches),
        "micro_batches": ITEM * volume(),
        f"{ITEM} bytes for each element": right,
    }
    fits = [what for what, number in short.items() if number != ITEM * right and number in numbers]
    if not fits or ITEM * right not in numbers:
        return ""
    each = ". After each micro-batch gradients are reduced, and not only after the last"
    each *= ITEM * right > short["reduce_each=True"]
    given = f"micro_batches={job.micro_batches}, reduce_each=True"
    return (
        f". {short[fits[0]]:.0f} is what the formula gives without {' or without '.join(fits)}. {ITEM} * "
        f"cost.communication_volume(run.psi, {job.stage}, {given}) is {ITEM * right:.0f}{each}"
    )


def _of_states(job: Job, run: Run, numbers: set[float]) -> str:
    """The same for the formula of the model states."""
    states = partial(memory.model_states, run.psi, job.ranks, job.stage)
    right = states("fp32", k=ITEM)
    short = {
        f"k={ITEM} (SGD with momentum remembers {ITEM} bytes a parameter)": states("fp32"),
        'precision="fp32"': states(k=ITEM),
        f'precision="fp32" and k={ITEM}': states(),
    }
    for what, held in short.items():
        for name in HELD:
            got, want = getattr(held, name), getattr(right, name)
            if got != want and {got, want} <= numbers:
                return f". {got:.0f} is what memory.model_states gives without {what}"
    return ""


def _settings(job: Job) -> dict:
    return {name: value for name, value in job._asdict().items() if name != "engine"}


def _values(run: Run) -> str | None:
    for rank, parameters in enumerate(run.parameters):
        if not torch.equal(parameters, run.alone):
            off = float((parameters - run.alone).abs().max())
            return f"run.parameters[{rank}] is not run.alone, off by up to {off:.1g}"
    return None


def _sent(job: Job, run: Run) -> str | None:
    right = ITEM * cost.communication_volume(run.psi, job.stage, job.micro_batches, reduce_each=True)
    wrong = [rank for rank, sent in enumerate(run.sent) if sent != right and job.ranks > 1]
    return f"run.sent[{wrong[0]}] is {run.sent[wrong[0]]}, and {right:.0f} is right" if wrong else None


def _held(job: Job, run: Run) -> str | None:
    right = memory.model_states(run.psi, job.ranks, job.stage, "fp32", k=ITEM)
    for rank, held in enumerate(run.memory):
        for name in HELD:
            got, want = getattr(held, name), getattr(right, name)
            if abs(got - want) >= 1:
                return f"run.memory[{rank}].{name} is {got:.0f}, and {want:.0f} is right"
    return None
