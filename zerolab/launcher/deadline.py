"""A deadline that a user gives: a number of seconds."""

import math
from numbers import Real
from typing import Any


def check_timeout(timeout: Any) -> None:
    """Refuse what is no deadline.

    Raises: TypeError for what is no number; ValueError for a number that is not positive or not finite.
    """
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise TypeError(f"timeout must be a number of seconds or None, got {timeout!r}")
    if not math.isfinite(timeout) or timeout <= 0:
        raise ValueError(f"timeout must be positive and finite, got {timeout!r}; None means the default")
