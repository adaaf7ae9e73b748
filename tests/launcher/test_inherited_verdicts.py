"""The fork server of the tests (support/fork_server.py): ranks inherit the verdicts on torch's optimizers."""

import sys

import cloudpickle
import torch

import zerolab
from zerolab.optimizer.probe import Kind, verdict, verdict_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


class Own(torch.optim.SGD):
    pass


def known_before(optimizer_class: type, keywords: dict) -> tuple[bool, Kind]:
    """Whether a rank has a verdict before it tries the optimizer, and the verdict."""
    subject = verdict.Subject(optimizer_class, keywords, None, verdict.AS_ASKED)
    known = subject.key in verdict._verdicts
    return known, verdict_of(optimizer_class, keywords).kind


def test_later_ranks_inherit_what_an_earlier_one_found_out(tmp_path, monkeypatch):
    keywords = {"lr": 0.1234}  # of no other test
    tried, inherited = ([(known, Kind.ELEMENTWISE)] for known in (False, True))
    assert zerolab.launch(known_before, 1, torch.optim.SGD, keywords) == tried
    assert zerolab.launch(known_before, 1, torch.optim.SGD, keywords) == inherited
    monkeypatch.chdir(tmp_path)  # the server imports zerolab anew
    assert zerolab.launch(known_before, 1, torch.optim.SGD, keywords) == inherited
    assert zerolab.launch(known_before, 1, torch.optim.SGD, {"lr": 0.4321}) == tried


def test_a_whole_parameter_verdict_too():
    keywords = {"lr": 0.1234}
    launches = [zerolab.launch(known_before, 1, torch.optim.Muon, keywords) for _ in range(2)]
    assert launches == [[(known, Kind.BY_PARAMETER)] for known in (False, True)]


def test_each_rank_tries_a_class_that_is_not_torchs():
    launches = [zerolab.launch(known_before, 1, Own, {"lr": 0.1234}) for _ in range(2)]
    assert launches == [[(False, Kind.ELEMENTWISE)]] * 2
