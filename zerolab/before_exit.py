"""before_exit: what a process waits for before it ends, because other ranks need it until then."""

import atexit
import sys
import weakref
from collections.abc import Callable

_waits: list[weakref.WeakMethod] = []


def before_exit(wait: Callable[[], None]) -> None:
    """Call a method of an object that is still there when the process ends, or a rank's function returns."""
    _waits.append(weakref.WeakMethod(wait, _waits.remove))


def wait_for_all() -> None:
    """Call them now. Raises: what they raise."""
    for reference in list(_waits):
        if (wait := reference()) is not None:
            wait()


@atexit.register
def _at_exit() -> None:
    """After an uncaught error nothing is waited for: other ranks may be waiting for this one to end."""
    if not hasattr(sys, "last_type"):
        wait_for_all()
