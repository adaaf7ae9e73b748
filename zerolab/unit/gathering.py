"""Gathering: the placeholder of a parameter whose new values are being gathered."""

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zerolab.unit.sharded import Sharded, describes


class Gathering(Sharded):
    """A parameter that was updated, a shard on each rank. Its shape and dtype can be read; other uses wait.

    A training loop goes on while the shards are sent, and needs no call that waits for them.
    """

    arrive: Callable[[], None]

    @classmethod
    def stand_in(
        cls, arrive: Callable[[], None], parameters: Sequence[nn.Parameter], layouts: Sequence[torch.Tensor]
    ) -> None:
        """Make parameters ``Gathering``. ``arrive`` waits for their values, and makes them whole."""
        for parameter in parameters:
            parameter.arrive = arrive  # type: ignore[attr-defined]  # it is ``Gathering`` next
        cls.take_places(parameters, layouts)

    @classmethod
    def give_way(cls, parameters: Sequence[nn.Parameter], own_classes: Sequence[type]) -> None:
        super().give_way(parameters, own_classes)
        for parameter in parameters:
            del parameter.arrive  # type: ignore[attr-defined]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if describes(func):
            return super().__torch_function__(func, types, args, kwargs)
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Gathering):
                each.arrive()
        if func.__name__ == "__get__":
            return getattr(args[0], func.__self__.__name__)  # its class may have its own, as for ``data``
        return func(*args, **(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]  # mypy loses the name of torch's keyword
        self.arrive()
        return repr(self)

    def __deepcopy__(self, memo):
        self.arrive()
        return deepcopy(self, memo)

    def __reduce_ex__(self, protocol):
        self.arrive()
        return self.__reduce_ex__(protocol)
