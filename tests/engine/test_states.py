"""The states of a unit and of the run: only the listed transitions happen, and errors name the state."""

import contextlib
import re
import sys
from collections import Counter

import cloudpickle
import pytest
import torch
from support.trained import build, train
from support.user_models import Net

import zerolab
from zerolab.engine import states as run_states
from zerolab.engine.states import TrainingRun, TrainingState
from zerolab.precision import PRECISIONS
from zerolab.storages import MemoryMeter
from zerolab.trace import Trace
from zerolab.unit import FlatUnit
from zerolab.unit import states as unit_states
from zerolab.unit.states import GradState, ParamState, change

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


def a_unit() -> FlatUnit:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    unit = FlatUnit("layer", 0, list(layer.named_parameters()), 2, PRECISIONS["fp32"])
    unit.own(slice(0, unit.shard_numel))
    unit.detach_shard()
    return unit


def test_a_verb_at_the_wrong_time_is_an_error_that_names_unit_and_state():
    unit = a_unit()
    with pytest.raises(
        RuntimeError, match=r"the parameters of unit layer are WHOLE .* cannot become GATHERING"
    ):
        unit.refill()
    unit = a_unit()
    unit.free()
    with pytest.raises(RuntimeError, match=r"are SHARDED .* become WHOLE: from there they become GATHERING$"):
        unit.restore_parameters()
    unit = a_unit()
    with pytest.raises(RuntimeError, match=r"the gradients of unit layer are EMPTY .* cannot become REDUCED"):
        unit.grads.keep(torch.zeros(unit.shard_numel))
    unit.grads.prepare_to_reduce()
    with pytest.raises(
        RuntimeError, match=r"the gradients of unit layer are REDUCING .* cannot become EMPTY"
    ):
        unit.grads.clear()


def test_the_run_leaves_one_state_before_it_goes_to_another():
    trace, meter = Trace(), MemoryMeter()
    training = TrainingRun(trace, meter)
    training.become(TrainingState.FORWARD)
    with training.during(TrainingState.STEP):
        assert trace.phase == meter.phase == "step"
        with pytest.raises(
            RuntimeError, match="the run is in STEP and cannot go to LOAD: let step end first"
        ):
            training.become(TrainingState.LOAD)
    assert trace.phase == meter.phase == "forward"


def transitions_of_a_run(stage: int) -> set[tuple[str, str]]:
    """Every change of a unit's state in a run with clipping, micro-batches and both kinds of zero_grad."""
    seen = Counter()

    def watched(whose, state, following):
        seen[state.name, following.name] += 1
        return change(whose, state, following)

    for module in ("unit", "grads"):
        sys.modules[f"zerolab.unit.{module}"].change = watched
    model, optimizer = build(stage)
    train(model, optimizer, 2)
    x = torch.randn(4, 8)
    with torch.no_grad():
        model(x)
    model(x).sum().backward()
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.clip_grad_norm_(1.0)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    with optimizer.no_sync():
        model(x).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    with optimizer.no_sync():
        model(x).sum().backward()
    optimizer.zero_grad()
    with optimizer.no_sync():
        model(x).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    return {pair for pair in seen if pair[0] != pair[1]}


PARAMETERS_AT = {0: set(), 2: {"WHOLE ARRIVING", "ARRIVING WHOLE"}}
PARAMETERS_AT[3] = {"WHOLE SHARDED", "SHARDED GATHERING", "GATHERING WHOLE"}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_transition_that_is_listed_happens_in_training(stage: int):
    """A table that allows more than what happens would not find a verb at the wrong time."""
    listed = {
        (state.name, following.name)
        for state, group in unit_states._FOLLOWING.items()
        for following in group
        if isinstance(state, GradState) or f"{state.name} {following.name}" in PARAMETERS_AT[stage]
    }
    assert {f"{s.name} {f.name}" for s, group in unit_states._FOLLOWING.items() for f in group} >= set.union(
        *PARAMETERS_AT.values()
    )
    sixteen_bits_only = {("REDUCING", "AVERAGED"), ("COLLECTING", "AVERAGED")}
    for seen in zerolab.launch(transitions_of_a_run, 2, stage, timeout=60):
        assert seen == listed - sixteen_bits_only


def test_phases_are_written_by_the_run_alone():
    assert {state.value for state in TrainingState} >= {"setup", "forward", "backward", "step"}
    assert run_states._FOLLOWING.keys() == set(TrainingState)


def words_of_a_step(stage: int) -> list[str]:
    model, optimizer = build(stage)
    unit = optimizer.units[0]
    words = [optimizer.state_of(unit)]
    loss = model(torch.randn(4, 8)).sum()
    loss.backward()
    words.append(optimizer.state_of(unit))
    optimizer.clip_grad_norm_(1.0)
    words.append(optimizer.state_of(unit))
    with optimizer.full_params():
        words.append(optimizer.state_of(unit))
    return words


def test_state_of_says_what_a_unit_is_doing():
    for words in zerolab.launch(words_of_a_step, 2, 3, timeout=60):
        before, after_backward, clipped, whole = words
        name = re.match(r"unit (\S+) in forward: ", before)[1]
        assert name and "its parameters are sharded" in before and before.endswith("its gradients are none")
        assert after_backward.endswith("its gradients are reduced to the sum over the ranks")
        assert clipped.endswith("its gradients are reduced to the mean over the ranks")
        assert "its parameters are whole" in whole
    assert ParamState.WHOLE.value == "whole"


def refusals_in_a_pass() -> list[str]:
    """What a call between steps says in the forward of a unit, and in its backward."""
    model, optimizer = build(3)
    said: list[str] = []

    def ask(*_) -> None:
        with pytest.raises(RuntimeError) as error:
            optimizer.require_idle("save")
        said.append(str(error.value))

    unit = model.blocks[1]
    unit.register_forward_pre_hook(ask)
    next(unit.parameters()).register_hook(ask)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.require_idle("save")
    return said


def test_a_refusal_inside_a_pass_says_what_the_open_unit_is_doing():
    for in_forward, in_backward in zerolab.launch(refusals_in_a_pass, 2, timeout=60):
        open_pass = "save in the middle of a forward or backward pass"
        state = "its parameters are whole; its gradients are"
        assert in_forward.startswith(f"{open_pass} (unit blocks.1 in forward: {state} none)")
        assert in_backward.startswith(f"{open_pass} (unit blocks.1 in backward: {state} collected")


def fail(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def after_a_broken_backward(stage: int | None, batches: int) -> list[torch.Tensor]:
    """Micro-batches, an exception in the second, then a step. In plain torch where stage is None."""
    torch.manual_seed(0)
    model = Net()
    if stage is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    else:
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, lr=0.05)
    middle = list(model.parameters())[len(list(model.parameters())) // 2]
    for seed in range(1, batches + 1):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        hook = middle.register_hook(fail) if seed == 2 else None
        with contextlib.suppress(ZeroDivisionError):
            model(x).square().mean().backward()
        if hook:
            hook.remove()
    optimizer.step()
    with contextlib.nullcontext() if stage is None else optimizer.full_params():
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("batches", [2, 3], ids=["step next", "another batch next"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_gradients_of_a_backward_pass_that_was_broken_off_count_as_in_torch(stage: int, batches: int):
    """Both ranks have the same data, so their mean is one process's gradient, bit for bit."""
    (plain,) = zerolab.launch(after_a_broken_backward, 1, None, batches, timeout=60)
    for found in zerolab.launch(after_a_broken_backward, 2, stage, batches, timeout=60):
        assert all(map(torch.equal, found, plain))


def step_in_a_hook(stage: int) -> str:
    model, optimizer = build(stage)
    next(model.parameters()).register_hook(lambda gradient: optimizer.step())
    try:
        model(torch.randn(4, 8)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_inside_a_backward_pass_is_refused(stage: int):
    for message in zerolab.launch(step_in_a_hook, 1, stage, timeout=60):
        assert "inside a backward pass" in message and "after backward() has returned" in message
