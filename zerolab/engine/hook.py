"""Hook: what the engine hangs into a user's modules, and what does not follow them when they are copied."""

from collections.abc import Callable


class Hook:
    """A module hook that stays behind when its module is copied or pickled: the copy is plain again."""

    def __init__(self, call: Callable | None = None):
        self.call = call

    def __call__(self, *args):
        return None if self.call is None else self.call(*args)

    def __deepcopy__(self, memo) -> "Hook":
        return Hook()

    def __reduce__(self):
        return (Hook, ())
