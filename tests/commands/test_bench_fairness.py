"""Promise: all contestants of the benchmark do the same work; who does not is named, and so is who fails."""

import re
import sys
from itertools import chain
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from support.contestants import HERE, settings, spoiled, tiny

import zerolab
from zerolab.__main__ import main
from zerolab.bench import bench, contestants, race
from zerolab.bench.contestants import CONTESTANTS, FLOOR

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def contestants_as_they_were():
    before = dict(CONTESTANTS)
    yield
    CONTESTANTS.update(before)


def broken(model, flags):
    raise RuntimeError("no such kernel")


def test_another_engine_that_fails_is_named_and_left_out(capsys, monkeypatch):
    build = spoiled("fully_shard", broken)
    monkeypatch.setattr(bench.models, "make", lambda name: build())
    assert main(["bench", "--contestants", "ddp", "fully_shard", "--rounds", "1", "--update", "fused"]) == 0
    assert re.search(r"^fully_shard +failed: .*no such kernel", capsys.readouterr().out, re.M)


def test_our_own_engine_that_fails_fails_the_command(capsys, monkeypatch):
    build = spoiled("zerolab-2", broken)
    monkeypatch.setattr(bench.models, "make", lambda name: build())
    assert main(["bench", "--contestants", "zerolab-2", "--rounds", "1", "--update", "fused"]) == 1
    assert "no such kernel" in capsys.readouterr().err


def tell_flags(model, flags):
    raise RuntimeError(f"flags {sorted(flags.items())}")


@pytest.mark.parametrize("update", contestants.UPDATES)
def test_a_table_has_the_update_that_was_asked_for(update: str, capsys, monkeypatch):
    build = spoiled("floor", tell_flags)
    monkeypatch.setattr(bench.models, "make", lambda name: build())
    assert main(["bench", "--contestants", "floor", "--rounds", "1", "--update", update]) == 1
    assert f"flags {sorted(contestants.UPDATES[update].items())}" in capsys.readouterr().err


def flags_of_all(update: str) -> dict[str, dict]:
    """What each contestant's own torch optimizer was told."""
    found = {}
    for name in HERE:
        owner = contestants.enter(name, tiny, update).update.__self__
        (group,) = getattr(owner, "optim", owner).param_groups
        found[name] = {flag: group[flag] for flag in contestants.UPDATES[update]} | {"lr": group["lr"]}
    return found


@pytest.mark.parametrize("update", contestants.UPDATES)
def test_all_sides_make_the_same_update(update: str):
    told = contestants.UPDATES[update] | {"lr": contestants.LEARNING_RATE}
    for found in zerolab.launch(flags_of_all, 2, update):
        assert found == dict.fromkeys(HERE, told)


# Nobody cheats.


def without_update(model, flags):
    contestant = contestants.ddp(model, flags)
    contestant.update = lambda: None
    return contestant


def without_messages(model, flags):
    return contestants.alone(model, flags)


def with_more_than_was_asked(model, flags):
    """As an engine that clips unless it is told not to."""
    contestant = contestants.ddp(model, flags)
    update = contestant.update

    def clip_and_update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update()

    contestant.update = clip_and_update
    return contestant


@pytest.mark.parametrize("cheat", [without_update, without_messages, with_more_than_was_asked])
def test_who_trains_something_else_is_found_out(cheat):
    build = spoiled("ddp+zero", cheat)
    found = race.race(settings("ddp", "ddp+zero", "zerolab-1", build=build))
    assert found.odd_ones_out() == ["ddp+zero"] and found.differences["ddp+zero"] > 0.01
    assert found.differences["ddp"] == 0


def test_the_table_says_who_trained_something_else(capsys, monkeypatch):
    build = spoiled("ddp+zero", without_messages)
    monkeypatch.setattr(bench.models, "make", lambda name: build())
    assert main(["bench", "--contestants", "ddp", "ddp+zero", "--rounds", "1", "--update", "fused"]) == 0
    assert "\nddp+zero has not trained what the others have" in capsys.readouterr().out


class Noting:
    """A contestant that notes the batches of its turns. Its clock goes on by one second for each step."""

    def __init__(self):
        self.turns = []
        self.now = 0.0

    def train(self, turn) -> None:
        self.now += len(turn)
        self.turns.append([batch[0] for batch in turn])

    def read(self) -> dict[str, torch.Tensor]:
        return {"turns": torch.tensor(self.now)}


def turns(steps: int, rounds: int) -> tuple[list, race.Result]:
    noting = Noting()
    clock = lambda: noting.now
    race.enter, race.time = lambda *_: noting, SimpleNamespace(perf_counter=clock, process_time=clock)
    return noting.turns, race.train_in_turn(settings(FLOOR, world_size=1, steps=steps, rounds=rounds))


def test_a_turn_has_so_many_steps_and_its_seconds_are_those_of_one():
    """5 turns of 2 steps have the batches of 10 turns of one. The first three turns do not count."""
    ((singles, _),) = zerolab.launch(turns, 1, steps=1, rounds=7)
    ((pairs, found),) = zerolab.launch(turns, 1, steps=2, rounds=2)
    assert [len(turn) for turn in pairs] == [2] * 5
    assert torch.equal(torch.stack([*chain(*pairs)]), torch.stack([*chain(*singles)]))
    assert found.seconds == found.cpu_seconds == {FLOOR: [1.0, 1.0]}
