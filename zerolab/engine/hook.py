"""Hook: a module hook that is not copied or pickled with its module."""

import weakref
from collections.abc import Callable

import torch


class Hook:
    """A module hook that is not copied or pickled with its module: the copy has a hook that does nothing.

    torch.compile does not look into it. It ends a compiled graph there instead, and so gathers and frees stay
    between the graphs of two units.
    """

    def __init__(self, call: Callable | None = None):
        self.call = call

    def __call__(self, *args):
        if self.call is None:
            return None
        return _outside_graphs(self.call, args) if torch.compiler.is_dynamo_compiling() else self.call(*args)

    def __deepcopy__(self, memo) -> "Hook":
        return Hook()

    def __reduce__(self):
        return (Hook, ())


@torch._disable_dynamo  # torch.compiler.disable would import torch._dynamo here, which takes two seconds
def _outside_graphs(call: Callable, args: tuple):
    return call(*args)


def weakly(call: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """Return a hook that calls ``call`` and does not keep it alive.

    PyTorch keeps a parameter's post-accumulate hooks where Python's garbage collector does not look. A hook
    that leads back to its parameter would keep it in memory for ever, with the model and the optimizer.
    """
    reference = weakref.ref(call)

    def hook(parameter: torch.Tensor) -> None:
        if (alive := reference()) is not None:
            alive(parameter)

    return hook
