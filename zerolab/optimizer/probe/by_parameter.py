"""By parameter: run an optimizer on whole parameters in one optimizer, and in several.

Ranks may own whole parameters of an optimizer whose update of a parameter depends on nothing but the history
of that parameter's own gradient, value and state, and the number of steps: Muon orthogonalizes a matrix,
Adafactor takes means of rows and columns, LAMB divides by the norm of a tensor. Each of them leaves the same
values and the same state, however the parameters are divided among optimizers.
"""

from itertools import zip_longest
from typing import NamedTuple

import torch

from zerolab.optimizer.probe.division import Build, compare
from zerolab.optimizer.probe.refused import WHOLE_CLASS, WHOLE_STATE, Kind, Refused, shown
from zerolab.optimizer.probe.state_bytes import measured_bytes
from zerolab.optimizer.probe.trial import ACROSS, Places, Plan, Trial
from zerolab.optimizer.probe.values import equal

_SMALL = {
    0: ((), (), ()),
    1: ((11,), (11,), (5,)),
    2: ((6, 7), (6, 7), (6, 7), (9, 4), (1, 8)),
    3: ((3, 4, 2), (3, 4, 2), (2, 3, 3)),
    4: ((4, 3, 2, 2), (4, 3, 2, 2), (2, 3, 3, 1)),
    5: ((2, 1, 2, 3, 2), (2, 1, 2, 3, 2), (1, 2, 2, 1, 3)),
}
"""By number of dimensions. The first two have one shape and one group: a class may update them at once."""
_LARGE = {
    1: ((200,), (200,)),
    2: ((131, 130), (131, 130), (200, 70)),
    4: ((16, 8, 3, 3), (16, 8, 3, 3)),
}
_MANY = {2: ((16, 16),) * 16 + ((4, 4),) * 16}
"""Some classes stack matrices of one shape. In 16 bits a product of a few of them seldom differs."""
_SMALL_KINDS = (
    *("smooth", "smooth", "small", "large", "parallel", "orthogonal", "orthogonal", "spiky"),
    *(
        "every other unused",
        "orthogonal",
        "zero",
        "smooth",
        "one large",
        "all but one unused",
        "small",
        "spiky",
    ),
    *("first group unused", "parallel", "smooth", "none used", "orthogonal", "large", "zero", "smooth"),
)
_LARGE_KINDS = ("every other unused", "smooth", "spiky")
_MANY_KINDS = ("noise",) * 24
_STEADY_KINDS = ("steady",) * 12
"""Some classes wait until an estimate changes no more, and then change the step of all parameters."""
_EXTREME_KINDS = (("smooth", "huge", "huge"), ("smooth", "one not finite", "smooth"))
"""A decomposition may fail on such gradients, in a single process too. Then they are not tried."""
_SCALES = (1.0, 0.01, 30.0)


class ByParameter(NamedTuple):
    """What the trials found of an optimizer that updates each whole parameter by itself.

    Attributes:
        taken: the numbers of dimensions of the parameters that it takes.
        failures: of each other number that was tried, the error.
        steps: after how many steps the state of a parameter has its size.
        device: where this can be measured: the meta device, or the CPU for an optimizer that needs values.
    """

    taken: tuple[int, ...]
    failures: dict[int, str]
    steps: int
    device: str

    @property
    def most_dims(self) -> int:
        return max(_SMALL)


def by_parameter(build: Build) -> ByParameter:
    """Try an optimizer on whole parameters. Raises: Refused if parameters depend on each other."""
    failures = {dims: error for dims, shapes in _SMALL.items() if (error := _failure(build, shapes[0]))}
    taken = _SMALL.keys() - failures.keys()
    if not taken:
        raise _untried(build, failures[2])
    small = _plan(_SMALL, taken, _SMALL_KINDS)
    sizes = compare(build, small, _divided(small))
    plans = [small._replace(kinds=_STEADY_KINDS)]
    for by_dims, kinds in ((_LARGE, _LARGE_KINDS), (_MANY, _MANY_KINDS)):
        if by_dims.keys() & taken:
            plans.append(_plan(by_dims, taken, kinds))
    for plan in plans:
        compare(build, plan, [plan.apart])
    for kinds in _EXTREME_KINDS:
        compare(build, small._replace(kinds=kinds), [small.apart], may_fail=True)
    steps = _settled(sizes)
    bytes_of_shapes = dict(zip(small.shapes, sizes[-1], strict=True))
    if not _measures(build, bytes_of_shapes, steps, "cpu"):
        raise Refused("the size of its state depends on more than the shape of a parameter", WHOLE_STATE)
    device = "meta" if _measures(build, bytes_of_shapes, steps, "meta") else "cpu"
    return ByParameter(tuple(sorted(taken)), failures, steps, device)


def _measures(build: Build, expected: dict[tuple[int, ...], int], steps: int, device: str) -> bool:
    """Whether measuring the state of one parameter of each shape gives the bytes that the trials saw."""
    try:
        found = {shape: measured_bytes(build, shape, steps, device) for shape in expected}
    except Exception:  # some operations have no implementation for the meta device
        return False
    return found == expected


def _plan(by_dims: dict[int, tuple], taken: set[int], kinds: tuple[str, ...]) -> Plan:
    """Parameters with each number of dimensions taken, in turn; the third of each is in a second group."""
    turns = enumerate(zip_longest(*(by_dims[dims] for dims in sorted(by_dims.keys() & taken))))
    placed = [(shape, int(turn >= 2)) for turn, each in turns for shape in each if shape is not None]
    shapes, groups = zip(*placed, strict=True)
    count = range(len(shapes))
    return Plan(
        shapes=shapes,
        scales=tuple(_SCALES[index % len(_SCALES)] for index in count),
        groups=groups,
        kinds=kinds,
        unused={
            "every other unused": count[::2],
            "all but one unused": count[1:],
            "first group unused": [index for index in count if not groups[index]],
            "none used": count,
        },
    )


def _failure(build: Build, shape: tuple[int, ...]) -> str:
    """Return the error of an optimizer over one parameter of this shape; nothing if all its steps succeed."""
    kinds = tuple(kind for kind in _SMALL_KINDS if not kind.endswith(("used", "unused")))
    plan = Plan((shape,), _SCALES[:1], (0,), kinds)
    try:
        trial = Trial(build, plan, plan.together)
    except Exception as error:
        return shown(error)
    for step, kind in enumerate(kinds):
        try:
            trial.step(trial.gradients(step))
        except Exception as error:
            return f"{shown(error)}, with gradients: {kind}"
    return ""


def _untried(build: Build, failure: str) -> Refused:
    """Say why no step succeeds.

    With a closure and one group some optimizers succeed, and show whether an update depends on other
    parameters.
    """
    plan = _plan(_SMALL, {1, 2}, ("smooth", "smooth", "spiky"))
    plan = plan._replace(groups=(0,) * len(plan.groups))
    failed = Refused(f"its step failed ({failure})", WHOLE_CLASS)
    try:
        runs = [Trial(build, plan, places) for places in (plan.together, plan.together, plan.apart)]
        for step in range(len(plan.kinds)):
            given = runs[0].gradients(step)
            for run in runs:
                run.step(given, lambda: torch.zeros(()))
    except Exception:
        return failed
    expected, again, apart = (run.weights() for run in runs)
    looks_across = equal(expected, again) and not equal(expected, apart)
    return Refused(ACROSS, WHOLE_CLASS, Kind.ACROSS_PARAMETERS) if looks_across else failed


def _divided(plan: Plan) -> list[Places]:
    """Ways to divide the parameters among optimizers: each alone, and among three ranks in another order."""
    (every,) = plan.together
    return [plan.apart, [every[rank::-3] for rank in (-1, -2, -3)]]


def _settled(sizes: list[list[int]]) -> int:
    """After how many steps no state changed its size any more. Raises: Refused where it still does."""
    steps = 1 + max((number + 1 for number, each in enumerate(sizes) if each != sizes[-1]), default=0)
    if steps == len(sizes):
        raise Refused(f"the size of its state still changes after {steps} steps", WHOLE_STATE)
    return steps
