"""before_exit: register what a process waits for before it ends, because other ranks need it until then.

It also waits before it is forked: the child has no thread that would end what is under way.
"""

import atexit
import os
import sys
import weakref
from collections.abc import Callable

_waits: list[weakref.WeakMethod] = []


def before_exit(wait: Callable[[], None]) -> None:
    """Register a method, to be called before the process ends or is forked, or a rank's function returns.

    It is not called if its object has been freed by then.
    """
    _waits.append(weakref.WeakMethod(wait, _waits.remove))


def wait_for_all() -> None:
    """Call the registered methods now."""
    for reference in list(_waits):
        if (wait := reference()) is not None:
            wait()


os.register_at_fork(before=wait_for_all)


@atexit.register
def _at_exit() -> None:
    """After an uncaught error nothing is waited for: other ranks may be waiting for this one to end."""
    if not hasattr(sys, "last_type"):
        wait_for_all()
