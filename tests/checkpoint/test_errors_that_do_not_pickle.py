"""Promise: an error of rank 0 reaches every rank in its words, also where pickle cannot make it again."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


class TwoArguments(Exception):
    """Pickle makes it of one argument."""

    def __init__(self, layer: str, what: str):
        super().__init__(f"{layer}: {what}")


def with_a_lock() -> Exception:
    error = ValueError("no weights here")
    error.lock = threading.Lock()
    return error


def of_a_local_class() -> Exception:
    class Local(Exception):
        pass

    return Local("no weights here")


def with_two_arguments() -> Exception:
    return TwoArguments("encoder", "no weights here")


def of_a_known_class() -> Exception:
    return ValueError("no weights here")


class Raising(nn.Linear):
    make: Callable[[], Exception]

    def get_extra_state(self):
        raise self.make()


def exported(make: Callable[[], Exception], folder: Path) -> tuple[str, str]:
    """On a rank: the class and the words of the error."""
    model = nn.Sequential(Raising(2, 2))
    model[0].make = make
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=1, lr=0.1)
    try:
        zerolab.export(optimizer, folder / "model.pt")
    except Exception as error:
        cause = error.__cause__
        return type(error).__name__, f"{error} | {cause}"
    return "", ""


@pytest.mark.parametrize("make", [with_a_lock, of_a_local_class, with_two_arguments, of_a_known_class])
def test_no_rank_waits_and_all_have_the_words(make: Callable, tmp_path: Path):
    on_0, on_1 = zerolab.launch(exported, 2, make, tmp_path, timeout=60)
    assert "no weights here" in on_0[1] and "no weights here" in on_1[1]
    if make is of_a_known_class:
        assert on_0[0] == on_1[0] == "ValueError"
    else:
        assert on_0[0] == on_1[0] == "RuntimeError" and type(make()).__name__ in on_1[1]
    assert list(tmp_path.iterdir()) == []
