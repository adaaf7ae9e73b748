"""State bytes: how much state an optimizer keeps for a whole parameter of a given shape."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerolab.optimizer.probe.values import tensors_in
from zerolab.storages import storage_bytes

_MOST_NUMBERS = 10_000


def bytes_of_state(state: dict, parameter: torch.Tensor) -> int:
    """Bytes of the storages of a parameter's state, without the parameter's own and without counters.

    A tensor without dimensions is a counter, as in Adam; the engine counts these apart.
    """
    own = parameter.untyped_storage()._cdata
    tensors = [each for each in tensors_in(state) if each.dim()]
    return storage_bytes(each for each in tensors if each.untyped_storage()._cdata != own)


def measured_bytes(
    build: Callable[[list], torch.optim.Optimizer], shape: tuple[int, ...], steps: int, device: str
) -> int:
    """Step one fp32 parameter of this shape and count its state.

    Memory: on the CPU what such a step takes; on the meta device nothing.
    """
    values = torch.linspace(-1.0, 1.0, math.prod(shape), dtype=torch.float32, device=device).view(shape)
    parameter = values.clone().requires_grad_()
    optimizer = build([[parameter]])
    with NumbersOfMeta():
        for _ in range(steps):
            parameter.grad = values.clone()
            optimizer.step()
    return bytes_of_state(optimizer.state.get(parameter, {}), parameter)


class NumbersOfMeta(TorchDispatchMode):
    """A number that is read from a tensor without contents, such as a norm, is 1.

    Otherwise Adafactor, which compares a norm with a bound on the CPU, could not be stepped there.
    """

    def __init__(self):
        super().__init__()
        self._numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is not torch.ops.aten._local_scalar_dense.default or not args[0].is_meta:
            return func(*args, **(kwargs or {}))
        self._numbers += 1
        if self._numbers > _MOST_NUMBERS:
            raise RuntimeError("a loop waits for a number that no tensor without contents has")
        return torch.ones((), dtype=args[0].dtype).item()
