"""The states of a unit's parameters and of its gradients, and the allowed transitions.

    parameters   WHOLE -> SHARDED -> GATHERING -> WHOLE, and WHOLE -> ARRIVING -> WHOLE after an update
    gradients    EMPTY -> COLLECTING -> REDUCING -> REDUCED -> AVERAGED, and back to EMPTY when cleared

A state is changed by `change` alone, which checks it. So a method called at the wrong time raises an error
that names the state, and gives no wrong number.
"""

from enum import Enum
from typing import TypeVar


class ParamState(Enum):
    """Where a unit's parameters are."""

    __hash__ = object.__hash__  # Enum's own hashes the name in Python, hundreds of times in a step

    WHOLE = "whole"
    SHARDED = "sharded: this rank holds its shard alone, and the flat buffer is freed"
    GATHERING = "being gathered: the flat buffer is there, and the other ranks' shards are on their way"
    ARRIVING = "updated, a shard on each rank: the other ranks' new shards are on their way"


class GradState(Enum):
    """How far a unit's gradients have come. Earlier micro-batches may be there beside those COLLECTING."""

    __hash__ = object.__hash__

    EMPTY = "none"
    COLLECTING = "collected on this rank, not reduced"
    REDUCING = "being reduced"
    REDUCED = "reduced to the sum over the ranks"
    AVERAGED = "reduced to the mean over the ranks"


_FOLLOWING: dict[Enum, set[Enum]] = {
    ParamState.WHOLE: {ParamState.SHARDED, ParamState.ARRIVING},
    ParamState.SHARDED: {ParamState.GATHERING},
    ParamState.GATHERING: {ParamState.WHOLE},
    ParamState.ARRIVING: {ParamState.WHOLE},
    GradState.EMPTY: {GradState.COLLECTING},
    GradState.COLLECTING: {GradState.REDUCING, GradState.EMPTY, GradState.REDUCED, GradState.AVERAGED},
    GradState.REDUCING: {GradState.REDUCED, GradState.AVERAGED},
    GradState.REDUCED: {GradState.COLLECTING, GradState.AVERAGED, GradState.EMPTY},
    GradState.AVERAGED: {GradState.COLLECTING, GradState.EMPTY},
}

State = TypeVar("State", ParamState, GradState)


def change(whose: str, state: State, following: State) -> State:
    """Return the state to follow ``state``. Raises: RuntimeError where it may not follow."""
    if following is not state and following not in _FOLLOWING[state]:
        allowed = ", ".join(sorted(each.name for each in _FOLLOWING[state]))
        raise RuntimeError(
            f"{whose} are {state.name} ({state.value}) and cannot become {following.name}: from there they "
            f"become {allowed}"
        )
    return following
