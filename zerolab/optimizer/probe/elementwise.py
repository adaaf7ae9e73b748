"""Elementwise: run an optimizer on whole parameters in one optimizer and on slices in several."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise, starmap

import torch

from zerolab.optimizer.probe.refused import OTHER_STATE, Refused, attempt
from zerolab.optimizer.probe.trial import Held, Places, Plan, Trial, cause, differing_option
from zerolab.optimizer.probe.values import described, equal, storable_in_slices

_GROUPS = (0, 1, 0, 1)
_UNITS = ((0, 1), (2,), (3,))
"""A matrix and a bias in the first unit, a convolution in the second, a scalar in the third."""
_UNUSED = {"first unit unused": _UNITS[0], "bias unused": (1,)}

Cuts = tuple[tuple[int, ...], ...]
"""At which elements each parameter is cut."""

PLANS: tuple[tuple[Plan, Cuts], ...] = (
    (
        Plan(
            shapes=((6, 7), (11,), (4, 3, 2, 2), ()),
            scales=(1.0, 0.01, 30.0, 1.0),
            groups=_GROUPS,
            kinds=(
                *("smooth", "smooth", "small", "large", "parallel", "orthogonal", "orthogonal", "spiky"),
                *("first unit unused", "orthogonal", "zero", "smooth", "large", "bias unused", "small"),
                *("spiky", "parallel", "smooth", "orthogonal", "small", "smooth", "zero", "spiky", "smooth"),
                *("two thirds zero", "smooth"),
            ),
            unused=_UNUSED,
        ),
        ((26,), (0,), (5,), (1,)),  # the first rank has nothing of the bias and all of the scalar
    ),
    # Some optimizers treat a small matrix like a vector. And some operations, such as sigmoid and pow, round
    # differently in the last elements of a tensor, which do not fill a vector register: a piece of 15 has no
    # other elements, and weights near zero show the last bit of an update.
    (
        Plan(
            shapes=((131, 130), (11,), (4, 3, 2, 2), ()),
            scales=(1e-6, 1e-6, 1e-6, 1e-6),
            groups=_GROUPS,
            kinds=("smooth", "spiky", "orthogonal"),
        ),
        (tuple(range(15, 600, 15)), (0,), (5,), (1,)),
    ),
)
"""The small one is first: it takes milliseconds also for an optimizer that decomposes matrices."""


_EXTREME_KINDS = ("smooth", "one element not finite", "smooth"), ("smooth", "huge", "smooth")
"""A class may look at such gradients before it updates. If it raises an error, this is not tried further."""


def bytes_of_an_element(build: Callable[[list], torch.optim.Optimizer]) -> float:
    """Bytes of state for each element. Raises: Refused if the update is not elementwise."""
    found = max([_try_plan(partial(Trial, build, plan), plan, _sharded(cuts)) for plan, cuts in PLANS])
    plan, cuts = PLANS[0]
    for kinds in _EXTREME_KINDS:
        _try_extreme(build, plan._replace(kinds=kinds), _sharded(cuts))
    return found


def _sharded(cuts: Cuts) -> Places:
    """As on two ranks with three units, and a unit that has no trainable parameters.

    The second rank has the last piece of each parameter, and the first rank the others.
    """
    pieces = [list(starmap(slice, pairwise((0, *each, None)))) for each in cuts]
    return [
        *([(index, part) for index in unit for part in pieces[index][:-1]] for unit in _UNITS),
        *([(index, pieces[index][-1]) for index in unit] for unit in _UNITS),
        [],
    ]


def _try_plan(make: Callable[[Places], Trial], plan: Plan, places: Places) -> float:
    """Step whole parameters and slices of them side by side; bytes of state for each element."""
    whole = attempt(
        partial(make, plan.together), "it does not take parameters of different shapes in two groups"
    )
    sharded = attempt(partial(make, places), "it does not take a parameter that was cut")
    for step, kind in enumerate(plan.kinds):
        given = whole.gradients(step)
        attempt(partial(whole.step, given), "its step failed on plain gradients")
        attempt(partial(sharded.step, given), "its step failed on slices of parameters, which may be empty")
        if not equal(whole.weights(), sharded.weights()):
            reason = cause(make, plan, step)
            reason = reason or "updating a tensor in pieces gave other numbers than updating it whole"
            raise Refused(f"{reason} (seen at step {step + 1}, with gradients: {kind})")
    for each in sharded.held:
        if key := differing_option(whole.held[each.index].group, each.group):
            raise Refused(f"the {key} that it keeps in a parameter group depends on which parameters it has")
    for each in whole.held:
        _compare_states(each, [piece for piece in sharded.held if piece.index == each.index])
    if whole.optimizers[0].state.keys() - {each.tensor for each in whole.held}:
        raise Refused("it keeps state that belongs to no parameter", OTHER_STATE)
    matrix = whole.held[0]
    tensors = [value for value in matrix.state.values() if isinstance(value, torch.Tensor) and value.dim()]
    return sum(tensor.nbytes for tensor in tensors) / matrix.tensor.numel()


def _try_extreme(build: Callable[[list], torch.optim.Optimizer], plan: Plan, places: Places) -> None:
    """Compare the parameters alone. Raises: Refused where slices end elsewhere, or fail alone."""
    whole, sharded = Trial(build, plan, plan.together), Trial(build, plan, places)
    for step, kind in enumerate(plan.kinds):
        given = whole.gradients(step)
        try:
            whole.step(given)
        except Exception:
            return
        attempt(
            partial(sharded.step, given), "its step failed on slices of parameters, and not on whole ones"
        )
        if not equal(whole.weights(), sharded.weights()):
            reason = "updating a tensor in pieces gave other numbers than updating it whole"
            raise Refused(f"{reason} (seen at step {step + 1}, with gradients: {kind})")


def _compare_states(whole: Held, pieces: list[Held]) -> None:
    """State has to be one number, the same for every slice, or one number for each element."""
    for piece in pieces:
        if keys := sorted(map(str, whole.state.keys() ^ piece.state.keys())):
            raise Refused(f"its state {keys[0]!r} is kept for some slices and not for others", OTHER_STATE)
        for key, value in piece.state.items():
            if not storable_in_slices(value, piece.tensor):
                raise Refused(f"its state {key!r} is {described(value)}", OTHER_STATE)
    for key, value in whole.state.items():
        found = [piece.state[key] for piece in pieces]
        if isinstance(found[0], torch.Tensor) and found[0].dim():
            value, found = value.reshape(-1), [torch.cat([each.reshape(-1) for each in found])]
        if not all(equal(value, each) for each in found):
            raise Refused(f"its state {key!r} differs between slices and a whole parameter")
