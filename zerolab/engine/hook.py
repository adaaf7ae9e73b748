"""Hook: what the engine hangs into a user's modules, and what does not follow them when they are copied."""

from collections.abc import Callable

import torch


class Hook:
    """A module hook that stays behind when its module is copied or pickled: the copy is plain again.

    torch.compile does not look into it. It ends a compiled graph there instead, and so gathers and frees stay
    between the graphs of two units.
    """

    def __init__(self, call: Callable | None = None):
        self.call = call

    @torch.compiler.disable
    def __call__(self, *args):
        return None if self.call is None else self.call(*args)

    def __deepcopy__(self, memo) -> "Hook":
        return Hook()

    def __reduce__(self):
        return (Hook, ())
