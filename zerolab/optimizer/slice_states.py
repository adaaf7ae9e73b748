"""What ``optimizer.state`` shows: the state of several stock optimizers, or that it is offloaded."""

from collections.abc import Iterator, MutableMapping
from typing import Any, NoReturn

import torch
from torch import nn

from zerolab.optimizer.models import held


class SliceStates(MutableMapping):
    """The state of several optimizers by tensor, like the ``state`` of one optimizer for all tensors.

    It is a view and copies nothing.
    Raises: RuntimeError for a parameter of a model, because the state is that of its slices.
    """

    def __init__(self):
        self._owners: dict[nn.Parameter, torch.optim.Optimizer] = {}

    def include(self, optimizer: torch.optim.Optimizer) -> None:
        """Add this optimizer's tensors."""
        self._owners |= {tensor: optimizer for group in optimizer.param_groups for tensor in group["params"]}

    def __getitem__(self, tensor: nn.Parameter) -> dict:
        if tensor not in (state := self._owner(tensor).state):  # a defaultdict: reading would add an entry
            raise KeyError(tensor)
        return state[tensor]

    def __setitem__(self, tensor: nn.Parameter, values: dict) -> None:
        self._owner(tensor).state[tensor] = values

    def __delitem__(self, tensor: nn.Parameter) -> None:
        del self._owner(tensor).state[tensor]

    def _owner(self, tensor: nn.Parameter) -> torch.optim.Optimizer:
        if tensor not in self._owners:
            refuse_whole(tensor)
        return self._owners[tensor]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (tensor for tensor, owner in self._owners.items() if tensor in owner.state)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class StatesAway(MutableMapping):
    """Stands in ``optimizer.state`` for state that is outside the device: it says which tensors have some.

    Raises: RuntimeError where a state itself is read, written or copied.
    """

    def __init__(self, states: MutableMapping):
        self._states = states

    def __getitem__(self, tensor: nn.Parameter) -> NoReturn:
        if tensor not in self:
            raise KeyError(tensor)
        _refuse("reading")

    def __contains__(self, tensor: object) -> bool:
        refuse_whole(tensor)
        return any(tensor is each for each in self._states)

    def __setitem__(self, tensor: nn.Parameter, values: dict) -> NoReturn:
        _refuse("writing")

    def __delitem__(self, tensor: nn.Parameter) -> NoReturn:
        _refuse("removing")

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __deepcopy__(self, memo: dict) -> NoReturn:
        _refuse("copying")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickling")


def refuse_whole(tensor: object) -> None:
    """Raises: RuntimeError for a parameter of a model that has a ZeroOptimizer.

    Not KeyError: ``in`` and ``get`` would catch it and answer that there is no state.
    """
    if isinstance(tensor, nn.Parameter) and tensor in held:
        raise RuntimeError(
            "optimizer.state was asked for a parameter of the model, and each rank keeps the state of its "
            "slices of the parameters: use optimizer.state[each.tensor] for each in optimizer.slices, where "
            "each.span.parameter is the parameter; optimizer.state.clear() removes the state of all; "
            "zerolab.save() stores it whole"
        )


def _refuse(action: str) -> NoReturn:
    raise RuntimeError(
        f"{action} the optimizer's state is refused, because it is offloaded between steps: read a copy with "
        "optimizer.state_dict(), and change it with optimizer.load_state_dict(...)"
    )
