"""Promise: the command that judges a library's optimizers tells accepted, refused and wrong ones apart."""

import sys

import cloudpickle
import optimizer_verdicts
import pytest
import torch
from support import odd_optimizers
from support.odd_optimizers import GlobalNorm, OwnSchedule, Projection, SignSGD
from support.whole_optimizers import StepCountInSelf
from support.whole_updates import Orthogonal

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Unforeseen(SignSGD):
    """Divides by the norm of a matrix that is 12 wide. The probe has none, and the GPT of the tests does."""

    def update(self, group: dict, p: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm() if p.dim() == 2 and p.shape[1] == 12 else gradient


@pytest.mark.long("a test of a program that is run by hand")
def test_each_class_is_refused_or_trained(monkeypatch, capsys):
    classes = [OwnSchedule, Projection, GlobalNorm, Orthogonal]
    monkeypatch.setattr(optimizer_verdicts, "classes_of", lambda module: classes)
    assert optimizer_verdicts.main(["a.module"]) == 0
    schedule, projection, norm, *orthogonal, total = capsys.readouterr().out.splitlines()
    assert schedule == "accepted  support.odd_optimizers.OwnSchedule()  same bits, elementwise"
    assert projection == "accepted  support.odd_optimizers.Projection()  same bits, by parameter"
    assert norm.startswith("refused   support.odd_optimizers.GlobalNorm()  GlobalNorm cannot be sharded: ")
    assert all(each.endswith("same bits, by parameter") for each in orthogonal) and len(orthogonal) == 2
    assert total == "3 accepted by parameter, 1 accepted elementwise, 1 refused"


def test_a_class_that_no_checkpoint_has_all_of_is_told(monkeypatch, capsys):
    """It counts its steps in itself, and its state_dict has no count, in one process either."""
    monkeypatch.setattr(optimizer_verdicts, "classes_of", lambda module: [StepCountInSelf])
    assert optimizer_verdicts.main(["a.module"]) == 0
    said = capsys.readouterr().out.splitlines()[0]
    assert said.endswith("same bits, other ones after a checkpoint, by parameter")


@pytest.mark.long("a test of a program that is run by hand")
def test_an_optimizer_of_matrices_leaves_other_parameters_to_sgd(monkeypatch, capsys):
    monkeypatch.setattr(optimizer_verdicts, "classes_of", lambda module: [torch.optim.Muon])
    assert optimizer_verdicts.main(["torch.optim"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 accepted by parameter"


def test_an_optimizer_that_the_probe_accepts_by_mistake_is_found_by_training(monkeypatch, capsys):
    monkeypatch.setattr(optimizer_verdicts, "classes_of", lambda module: [Unforeseen])
    assert optimizer_verdicts.main(["a.module"]) == 1
    wrong, total = capsys.readouterr().out.splitlines()
    assert wrong.endswith("other parameters at stage 1 of gpt, other parameters at stage 3 of gpt")
    assert total == "1 wrong"


def test_a_class_that_takes_too_long_is_told_and_the_next_one_is_tried(monkeypatch, capsys):
    monkeypatch.setattr(optimizer_verdicts, "classes_of", lambda module: [OwnSchedule, Projection])
    monkeypatch.setattr(optimizer_verdicts, "TIMEOUT_SECONDS", 1)
    assert optimizer_verdicts.main(["a.module"]) == 1
    *slow, total = capsys.readouterr().out.splitlines()
    assert [each.split("  ")[-1] for each in slow] == ["not trained to its end in 1 s"] * 2
    assert total == "2 too slow"


def test_a_library_that_is_not_installed_is_named_in_one_line(capsys):
    assert optimizer_verdicts.main(["torch.optim", "gone_library.optim"]) == 2
    printed = capsys.readouterr()
    said = "No module named 'gone_library': install its package, or check the name\n"
    assert (printed.out, printed.err) == ("", f"optimizer_verdicts.py: {said}")


def test_the_classes_of_a_module_and_the_keywords_they_are_tried_with():
    found = optimizer_verdicts.classes_of(odd_optimizers.__name__)
    assert {SignSGD, Projection} <= set(found) and torch.optim.Optimizer not in found
    adam = list(optimizer_verdicts.keywords_of(torch.optim.Adam, switches=True))
    assert {} in adam and {"weight_decay": 0.1} in adam and {"weight_decay": 0.1, "amsgrad": True} in adam
    assert len(list(optimizer_verdicts.keywords_of(SignSGD, switches=True))) == 1
