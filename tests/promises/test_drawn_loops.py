"""Promise: whatever actions are drawn, every rank has the bits of replicas, or all raise a clear error."""

import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import cloudpickle
import drawn_loops
import pytest
import torch
from support.loops import campaign, plans, shrinking
from support.loops.plans import Loop, Setting
from support.loops.session import Report, differences, is_clear

import zerolab
from zerolab.optimizer import optimizer
from zerolab.unit import FlatUnit
from zerolab.unit.grads import FlatGrads
from zerolab.unit.states import GradState

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

LOOPS, SEED = 40, 0
STEPS = (("train", 1), ("step",), ("zero_grad", "none"), ("train", 2), ("clip", 0.1, 2.0), ("step",))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.long("a test of a program that is run by hand")
def test_drawn_loops_as_they_are_run_by_hand(capsys):
    assert drawn_loops.main(["--loops", str(LOOPS), "--seed", str(SEED)]) == 0, capsys.readouterr().out
    assert f"{LOOPS} loops, " in capsys.readouterr().out


def test_a_seed_is_one_loop_and_all_actions_are_drawn():
    loops = [plans.draw(seed) for seed in range(300)]
    assert loops == [plans.draw(seed) for seed in range(300)]
    drawn = {action[0] for loop in loops for action in loop.actions}
    alone = {f"alone: {loop.odd[1][0]}" for loop in loops if loop.odd}
    assert drawn == plans.ACTIONS.keys() - plans.KNOWN.keys()
    assert alone and not alone & plans.KNOWN.keys()
    assert {loop.setting.stage for loop in loops} == {0, 1, 2, 3}
    assert {loop.setting.world_size for loop in loops} == {1, 2, 3}
    assert eval(repr(loops), {"Loop": Loop, "Setting": Setting, "inf": float("inf")}) == loops


# What the loops would find.


def never_divides(self, *args) -> None:
    self._become(GradState.AVERAGED)


def does_nothing(self, *args) -> None:
    pass


def raises_by_mistake(self, *args) -> None:
    raise IndexError("list index out of range")


def ends_the_process(self, *args) -> None:
    os._exit(3)


def expects_no_reader(self, updated: set) -> None:
    self.writes.advance(updated, self.whole)


KINDS = ("convolution",)  # autograd saves its weights themselves, and those of a linear layer as a view
PUT_BACK = (("train", 1), ("keep_gradient", 1), ("zero_grad", "none"), ("train", 2), ("put_back",))
OLDER_GRAPH = (
    ("forward_part", 1, "first"),
    ("forward_part", 2, "last"),
    ("backward", False, True, True),
    ("step",),
    ("backward", False, True, True),
    ("step",),
)
BROKEN = {
    "gradients are not divided": (3, FlatGrads, "average", never_divides, STEPS, "differs"),
    "an assertion or an index": (3, FlatGrads, "average", raises_by_mistake, STEPS, "step: unclear error"),
    "a crash": (3, FlatGrads, "average", ends_the_process, STEPS, "step: the ranks ended"),
    "a write that is lost": (
        3, FlatUnit, "write_back", does_nothing, (*STEPS, ("write", 1, "fill", True)), "differs",
    ),
    "a gradient that was kept is the next one, too": (
        3, FlatGrads, "_drop_kept_markers", does_nothing, PUT_BACK, "differs",
    ),
    "a graph older than a step reads what is not there yet": (
        2, FlatUnit, "mark_updated", expects_no_reader, OLDER_GRAPH, "differs",
    ),
    "hooks on all optimizers run for each stock optimizer": (
        3, optimizer, "no_hooks_on_all", nullcontext, (("train", 1), ("watch_a_step",)), "differs",
    ),
}  # fmt: skip
"""By fault: the stage, whose method is another, which one, and what the loop's finding begins with."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_engine_is_found(name: str, monkeypatch):
    stage, owner, method, replacement, actions, found = BROKEN[name]
    loop = Loop(Setting(stage=stage), KINDS, actions=actions, reads=False)
    whole = campaign.run_batch

    def run_batch(planned: list, scratch: Path) -> list[Report]:
        setattr(owner, method, replacement)
        return whole(planned, scratch)

    monkeypatch.setattr(campaign, "run_batch", run_batch)
    (report,) = campaign.run([(7, loop)])
    assert report.problem and shrinking.kind_of(report).startswith(found), report


def test_the_loops_that_find_a_fault_find_none_in_the_engine():
    settings = [(Setting(stage=stage), actions) for stage, *_, actions, _ in BROKEN.values()]
    loops = [Loop(setting, KINDS, actions=actions, reads=False) for setting, actions in settings]
    assert [report.problem for report in campaign.run(list(enumerate(loops)))] == [""] * len(loops)


def test_what_one_rank_does_alone_is_found():
    loop = Loop(Setting(stage=1), odd=(1, ("write", 1, "fill", True)))
    (report,) = campaign.run([(7, replace(loop, odd=(1, ("set_option", 0, "lr", 0.3))))])
    assert report.problem == "" and "ranks disagree" in report.refused[0][1]
    (report,) = campaign.run([(7, loop)])
    assert report.problem.startswith("silent") or report.refused


def test_shrinking_leaves_what_is_needed(monkeypatch):
    def run(planned: list, backend: str = "gloo"):
        for seed, loop in planned:
            names = [action[0] for action in loop.actions]
            wrong = "save" in names and "load" in names[names.index("save") :] and loop.setting.stage > 0
            yield Report(seed, len(names), "differs: a, b" if wrong else "", ("look",))

    monkeypatch.setattr(campaign, "run", run)
    loops = (each for each in map(plans.draw, range(5000)) if not each.odd)
    loop = next(each for each in loops if next(run([(0, each)])).problem)
    small, report, _ = shrinking.shrunk(loop, next(run([(0, loop)])))
    assert [action[0] for action in small.actions] == ["save", "load"] and report.problem
    assert (small.kinds, small.frozen, small.held, small.tied, small.setting.stage) == ((), (), (), False, 1)


def test_bits_and_errors_are_judged():
    one = torch.ones(2)
    assert list(differences({"a": one}, {"a": one.clone()})) == []
    assert list(differences({"a": one}, {"a": one + 1e-7})) == ["a"]
    assert list(differences({"a": one}, {"b": one})) and list(differences({"a": one}, {"a": one.bfloat16()}))
    nan = float("nan")
    assert list(differences(nan, nan)) == [] and list(differences(0.0, nan)) and list(differences(None, 0.0))

    def error_of(action) -> Exception:
        with pytest.raises(Exception) as caught:
            action()
        return caught.value

    assert is_clear(error_of(lambda: zerolab.ZeroOptimizer(None, torch.optim.SGD)))
    assert not is_clear(error_of(lambda: [].pop()))
    assert not is_clear(error_of(lambda: zerolab.storages.storage_bytes([3])))
