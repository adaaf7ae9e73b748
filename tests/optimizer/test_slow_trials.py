"""Promise: where trying an optimizer takes long, rank 0 says so while it waits."""

import logging
import sys
import threading
import time

import cloudpickle
import pytest
import torch

import zerolab
from zerolab.optimizer.probe import verdict, verdict_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


class Slow(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(0.002)
        return super().step(closure)


def logged(limit: float, lr: float) -> list[str]:
    """What is logged while an optimizer is tried, and the limit of silence is so many seconds."""
    verdict.SILENT_SECONDS = limit
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("zerolab")
    log.addHandler(handler)
    try:
        verdict_of(Slow, {"lr": lr})
    finally:
        log.removeHandler(handler)
    return lines


@pytest.fixture(autouse=True)
def limit_as_it_was(monkeypatch):
    monkeypatch.setattr(verdict, "SILENT_SECONDS", verdict.SILENT_SECONDS)


def test_a_slow_trial_is_announced_once_with_the_class_and_the_seconds():
    (line,) = logged(0.05, lr=0.101)
    assert "Slow" in line and "0.05 s" in line


def test_a_trial_within_the_limit_says_nothing_and_leaves_no_timer():
    assert verdict.SILENT_SECONDS >= 30, "on a busy machine ordinary trials take seconds"
    assert logged(30.0, lr=0.102) == []
    assert [each for each in threading.enumerate() if isinstance(each, threading.Timer)] == []


def test_what_was_tried_before_says_nothing():
    logged(30.0, lr=0.103)
    assert logged(0.0, lr=0.103) == []


def test_of_several_ranks_the_first_says_it():
    assert [len(lines) for lines in zerolab.launch(logged, 3, 0.05, lr=0.104)] == [1, 0, 0]
