"""Promise: the actions that hypothesis puts together, one rule after the other, leave the bits of replicas.

The rules are the actions of the drawn loops. Those are drawn from a seed, and one launch runs many, so that
ten minutes hold hundreds. Here every sequence has a launch of its own, and hypothesis shrinks one that fails.
"""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from support.loops import campaign, plans
from support.loops.models import KINDS
from support.loops.plans import Loop
from support.loops.session import Report

CHANCE = st.randoms(use_true_random=False)
MOST_KINDS = 3
MACHINE = settings(
    max_examples=8,
    stateful_step_count=16,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


class LoopMachine(RuleBasedStateMachine):
    """What a user does, an action at a time. The ranks do all of it when the sequence ends.

    They compare themselves with the replicas after each action (`support.loops.session`).
    """

    @initialize(
        chance=CHANCE,
        kinds=st.lists(st.sampled_from(sorted(KINDS)), max_size=MOST_KINDS),
        optimizer=st.sampled_from(sorted(plans.OPTIMIZERS)),
        tied=st.booleans(),
    )
    def build(self, chance, kinds: list[str], optimizer: str, tied: bool) -> None:
        setting = plans.setting(chance, campaign.MOST_RANKS)
        self.loop = Loop(setting, tuple(kinds), tied, optimizer=optimizer)

    def act(self, name: str, arguments: tuple) -> None:
        self.loop = replace(self.loop, actions=(*self.loop.actions, (name, *arguments)))

    def teardown(self) -> None:
        loop = replace(self.loop, actions=tuple(plans.unknown(self.loop)))
        (report,) = campaign.run([(0, loop)])
        assert not report.problem, f"{report.at}: {report.problem}\n--replay {str(loop)!r}"


def rule_of(name: str, arguments: plans.Draw):
    @rule(chance=CHANCE)
    def act(self: LoopMachine, chance) -> None:
        self.act(name, arguments(chance))

    return act


for _name, (_, _arguments) in plans.ACTIONS.items():
    if _name not in plans.KNOWN:
        setattr(LoopMachine, _name, rule_of(_name, _arguments))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_every_sequence_has_the_bits_of_replicas_or_a_clear_error():
    run_state_machine_as_test(LoopMachine, settings=MACHINE)


def test_a_sequence_that_fails_is_found_and_made_smaller(monkeypatch):
    """The ranks are left out: here a save before a load at a stage above 0 is the mistake."""
    failed: list[Loop] = []

    def run(planned: list):
        ((seed, loop),) = planned
        names = [action[0] for action in loop.actions]
        wrong = "save" in names and "load" in names[names.index("save") :] and loop.setting.stage > 0
        failed.extend([loop] * wrong)
        yield Report(seed, len(names), "differs: a, b" if wrong else "", ("look",))

    monkeypatch.setattr(campaign, "run", run)
    with pytest.raises(AssertionError, match="differs: a, b"):
        run_state_machine_as_test(LoopMachine, settings=settings(MACHINE, max_examples=2000))
    assert [action[0] for action in failed[-1].actions] == ["save", "load"]
    assert failed[-1].kinds == () and not failed[-1].tied
