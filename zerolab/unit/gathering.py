"""Gathering: the placeholder of a parameter whose new values are being gathered."""

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zerolab.unit.sharded import Sharded, describes


class Gathering(Sharded):
    """A parameter that was updated, a shard on each rank. It says what it is; any use of it waits for it.

    A training loop goes on while the shards are sent, and needs no call that waits for them.
    """

    arrive: Callable[[], None]

    @classmethod
    def stand_in(cls, arrive: Callable[[], None], parameter: nn.Parameter, layout: torch.Tensor) -> None:
        """Make a parameter ``Gathering``. ``arrive`` waits for its values, and makes it whole."""
        cls.take_place(parameter, layout)
        parameter.arrive = arrive  # type: ignore[attr-defined]  # it is ``Gathering`` now

    def give_way(self, own_class: type[nn.Parameter]) -> None:
        del self.arrive
        super().give_way(own_class)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if describes(func):
            return super().__torch_function__(func, types, args, kwargs)
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Gathering):
                each.arrive()
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
