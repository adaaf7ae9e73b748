"""Checkpoints of a small model whose parameters all equal one number, which is stored as the extra too."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import zerolab
from zerolab.unit.sharded import Sharded


def build(stage: int = 2, model: nn.Module | None = None, optimizer=torch.optim.Adam, **settings):
    """On a rank: an optimizer that has state."""
    model = model or nn.Sequential(nn.Linear(31, 17), nn.Linear(17, 5))
    zero = zerolab.ZeroOptimizer(model, optimizer, stage, lr=0.01, **settings)
    sum(p.sum() for p in model.parameters() if not isinstance(p, Sharded)).backward()
    zero.step()
    zero.zero_grad()
    return zero


def fill(optimizer: zerolab.ZeroOptimizer, number: float) -> None:
    with optimizer.full_params(), torch.no_grad():
        for parameter in optimizer.model.parameters():
            parameter.fill_(number)


def filled_with(optimizer: zerolab.ZeroOptimizer) -> set[float]:
    with optimizer.full_params():
        return {value for parameter in optimizer.model.parameters() for value in parameter.flatten().tolist()}


def save_numbers(folder: Path, numbers: range, **options) -> None:
    """On a rank: one generation for each number, with parameters all equal to it, and it as extra."""
    optimizer = build()
    for number in numbers:
        fill(optimizer, number)
        zerolab.save(optimizer, folder, extra=number, **options)


def load_numbers(folders: list[Path]) -> list[tuple[int, set[float], list[str]]]:
    """On a rank: what each folder loads, and what is in it after one save more.

    Whatever generation looks complete can be loaded, before that and after it.
    """
    optimizer, found = build(), []
    for folder in folders:
        for manifest in folder.glob("generation-*/manifest.pt"):
            zerolab.load(optimizer, manifest.parent)
        extra = zerolab.load(optimizer, folder)
        values = filled_with(optimizer)
        zerolab.save(optimizer, folder)
        found.append((extra, values, sorted(name for name in os.listdir(folder) if name != ".lock")))
        for generation in folder.glob("generation-*"):
            zerolab.load(optimizer, generation)
    return found


def outcome(action: Callable) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"
