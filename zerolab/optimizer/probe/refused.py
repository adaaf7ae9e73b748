"""Refused: why an optimizer cannot be sharded, or not in this way, and what to do about it."""

from collections.abc import Callable
from enum import Enum
from typing import Any

OTHER_CLASS = (
    "ZeRO needs an elementwise update, one that treats each element by its own history alone: pass Adam, "
    "AdamW, SGD, RMSprop, Adagrad or another such class"
)
OTHER_STATE = (
    "A checkpoint stores one value for a parameter, as a number or a tensor without dimensions, or a tensor "
    "of the parameter's shape: change the class to keep its state so, or pass another class"
)
OTHER_ARGUMENTS = (
    "ZeRO builds it from parameter groups, as in Adam([{'params': [...]}], lr=0.1): pass a class that takes "
    "them and wraps no model or other optimizer"
)
WHOLE_CLASS = (
    "ZeRO needs an update that treats each element, or each whole parameter, by its own history alone: pass "
    "AdamW, SGD, Muon or another such class"
)
WHOLE_STATE = (
    "A checkpoint stores a parameter's state as numbers and tensors without gaps, and lists and dicts of "
    "them: change the class to keep its state so, under its parameter and of a constant size, or pass "
    "another class"
)


class Kind(Enum):
    """On what the update of an optimizer depends, and so where ZeRO may cut a parameter."""

    ELEMENTWISE = "elementwise: the update of an element depends on the history of that element alone"
    BY_PARAMETER = "by parameter: the update of a parameter depends on the history of that parameter alone"
    ACROSS_PARAMETERS = "across parameters: the update of a parameter depends on its other parameters"
    UNSUITABLE = "unsuitable: two runs of it cannot be compared, or its state cannot be stored"

    @property
    def short(self) -> str:
        """The value without its explanation."""
        return self.value.split(":")[0]


class Refused(Exception):
    """An optimizer cannot be sharded in the way that was tried.

    Args: kind: what is known of its update from the reason alone.
    """

    def __init__(self, reason: str, way_out: str = OTHER_CLASS, kind: Kind = Kind.UNSUITABLE):
        super().__init__(reason)
        self.reason, self.way_out, self.kind = reason, way_out, kind


def attempt(action: Callable[[], Any], reason: str, way_out: str = OTHER_CLASS) -> Any:
    """Return what ``action`` returns. Raises: Refused with this reason, where it raises an error."""
    try:
        return action()
    except Exception as error:
        raise Refused(f"{reason} ({shown(error)})", way_out) from error


def shown(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {error}".rstrip(".")
