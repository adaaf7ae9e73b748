"""Division: step one optimizer, and several among which its parameters are divided, side by side."""

from collections.abc import Callable
from functools import partial

import torch

from zerolab.optimizer.probe.refused import WHOLE_CLASS, WHOLE_STATE, Kind, Refused, attempt, shown
from zerolab.optimizer.probe.state_bytes import bytes_of_state
from zerolab.optimizer.probe.trial import (
    ACROSS,
    DIFFERENT_EACH_TIME,
    RANDOM,
    Places,
    Plan,
    Trial,
    cause,
    differing_option,
)
from zerolab.optimizer.probe.values import described, equal, storable_whole

Build = Callable[[list], torch.optim.Optimizer]


def compare(build: Build, plan: Plan, ways: list[Places], may_fail: bool = False) -> list[list[int]]:
    """Step one optimizer, and several for each way to divide the parameters, side by side.

    Args: may_fail: whether to end without a verdict where the one optimizer's step fails.
    Returns: after each step, the bytes of state of each parameter.
    Raises: Refused where something depends on how the parameters are divided.
    """
    make = partial(Trial, build, plan)
    whole = attempt(partial(make, plan.together), "it does not take two groups", WHOLE_CLASS)
    divided = [
        attempt(partial(make, places), "it does not take a group without parameters", WHOLE_CLASS)
        for places in ways
    ]
    sizes: list[list[int]] = []
    for step, kind in enumerate(plan.kinds):
        seen = f"seen at step {step + 1}, with gradients: {kind}"
        given = whole.gradients(step)
        try:
            _step_whole(whole, given, kind, seen)
        except Refused as refusal:
            if may_fail and refusal.__cause__:
                return sizes
            raise
        for run in divided:
            _step_divided(run, given, seen)
            if not equal(whole.weights(), run.weights()):
                raise _differing(cause(make, plan, step) or ACROSS, seen)
            _compare_kept(whole, run, seen)
        sizes.append([bytes_of_state(each.state, each.tensor) for each in whole.held])
    _check_state(whole)
    return sizes


def _step_whole(whole: Trial, given: list, kind: str, seen: str) -> None:
    random = torch.get_rng_state()
    try:
        whole.step(given)
    except Exception as error:
        why = Kind.UNSUITABLE if kind in whole.plan.unused else Kind.ACROSS_PARAMETERS
        reason = f"its step failed with several parameters ({shown(error)}; {seen})"
        raise Refused(reason, WHOLE_CLASS, why) from error
    if not equal(random, torch.get_rng_state()):
        raise Refused(f"{RANDOM} ({seen})", WHOLE_CLASS)


def _step_divided(run: Trial, given: list, seen: str) -> None:
    try:
        run.step(given)
    except Exception as error:
        reason = f"its step failed with some of the parameters, not with all ({shown(error)}; {seen})"
        raise Refused(reason, WHOLE_CLASS, Kind.ACROSS_PARAMETERS) from error


def _differing(reason: str, seen: str) -> Refused:
    kind = Kind.UNSUITABLE if reason in (RANDOM, DIFFERENT_EACH_TIME) else Kind.ACROSS_PARAMETERS
    return Refused(f"{reason} ({seen})", WHOLE_CLASS, kind)


def _compare_kept(whole: Trial, run: Trial, seen: str) -> None:
    """What an optimizer keeps for a parameter, and in its group, may not depend on the other parameters."""
    for optimizer in run.optimizers:
        for group, other in zip(whole.optimizers[0].param_groups, optimizer.param_groups, strict=True):
            if key := differing_option(group, other):
                which = "which parameters it has" if other["params"] else "whether it has any parameters"
                raise _differing(f"the {key} that it keeps in a parameter group depends on {which}", seen)
    held = {each.index: each for each in run.held}
    for each in whole.held:
        other = held[each.index].state
        for key in each.state.keys() | other.keys():
            if key not in each.state or key not in other or not equal(each.state[key], other[key]):
                raise _differing(f"its state {key!r} of a parameter depends on its other parameters", seen)


def _check_state(whole: Trial) -> None:
    """A checkpoint stores state by parameter, without any class of the optimizer's own."""
    if whole.optimizers[0].state.keys() - {each.tensor for each in whole.held}:
        raise Refused("it keeps state that belongs to no parameter", WHOLE_STATE)
    for each in whole.held:
        for key, value in each.state.items():
            if not storable_whole(value):
                raise Refused(f"its state {key!r} is {described(value)}", WHOLE_STATE)
