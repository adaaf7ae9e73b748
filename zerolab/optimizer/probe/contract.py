"""Contract: how a class has to treat its parameters, so that it can be given slices of them.

The trials compare the values that an update leaves. A class may do more: change ``.data`` to other memory,
register hooks on gradients, send messages, read the names of its parameters, or override zero_grad. Its
slices are in no autograd graph, have no names, and differ from rank to rank. So these things would not happen
as in a single process, without an error. torch's own classes do none of them and are not tried.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zerolab.optimizer.probe.refused import Refused

SHAPES = ((4, 3), (4, 3), (3,))
"""Of the parameters: some classes take only matrices, and then the first two are tried."""
STEPS = 3
CHANGE = "Change the class, or pass another one"

Build = Callable[[list], torch.optim.Optimizer]


class BrokenContract(Refused):
    """The class does what slices cannot give it, whole parameters no more than others."""


def is_torchs(optimizer_class: type) -> bool:
    """Whether the class is one of torch.optim, and no class derived from one."""
    return optimizer_class.__module__.split(".")[:2] == ["torch", "optim"]


def require_contract(optimizer_class: type[torch.optim.Optimizer], build: Build) -> None:
    """Step a few small parameters. Raises: BrokenContract where the class does what slices cannot give it.

    An error of the class itself ends the trial without a verdict: the other trials report it.
    """
    if is_torchs(optimizer_class):
        return
    if optimizer_class.zero_grad is not torch.optim.Optimizer.zero_grad:
        raise BrokenContract("it overrides zero_grad, which ZeroOptimizer.zero_grad does not call", CHANGE)
    if not _try(build, SHAPES):
        _try(build, SHAPES[:2])


def _try(build: Build, shapes: tuple[tuple[int, ...], ...]) -> bool:
    """Whether the class takes such parameters. Raises: BrokenContract."""
    parameters = [
        nn.Parameter(torch.linspace(-1.0, 1.0, 12)[: torch.Size(shape).numel()].view(shape))
        for shape in shapes
    ]
    places = list(map(_place, parameters))
    try:
        with _NoCollectives():
            optimizer = build([parameters])
            _require_left(parameters, places)
            groups = [_Group(group) for group in optimizer.param_groups]
            optimizer.param_groups = list[dict](groups)
            for step in range(STEPS):
                for parameter in parameters:
                    parameter.grad = torch.cos(torch.arange(step, step + parameter.numel())).view(
                        parameter.shape
                    )
                optimizer.step()
                _require_left(parameters, places)
    except BrokenContract:
        raise
    except Exception:
        return False
    if any(group.asked_for_names for group in groups):
        raise BrokenContract("it reads the names of its parameters, and slices have none", CHANGE)
    return True


def _place(parameter: nn.Parameter) -> tuple:
    return parameter.data_ptr(), parameter.shape, parameter.stride()


def _require_left(parameters: list[nn.Parameter], places: list[tuple]) -> None:
    """Raises: BrokenContract where the class gave a parameter other memory, or hooks."""
    for parameter, place in zip(parameters, places, strict=True):
        if _place(parameter) != place:
            raise BrokenContract(
                "it gives a parameter other memory, as `p.data = ...` does, and the slice's memory is the "
                "model's",
                "Let it write in place, as p.data.add_(...) and p.data.copy_(...) do, or pass another class",
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise BrokenContract(
                "it registers hooks on its parameters, and a slice gets its gradient without a backward pass",
                "Let it update in step(), or pass another class",
            )


class _Group(dict):
    """A parameter group that notes whether somebody asks for the names of its parameters."""

    asked_for_names = False

    def __getitem__(self, key: Any) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self._note(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def _note(self, key: Any) -> None:
        self.asked_for_names |= key == "param_names"


class _NoCollectives(TorchDispatchMode):
    """Raises: BrokenContract at a collective."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise BrokenContract(
                f"it calls a collective ({func.__name__.partition('.')[0]}), and ranks have different slices",
                "zerolab averages the gradients and shares the update: pass a class that sends nothing",
            )
        return func(*args, **(kwargs or {}))


def closure_refusal(build: Build) -> str:
    """Say what a class does with a closure other than to call it once, first; nothing if it does just that.

    ZeroOptimizer calls the closure itself, once, and the class gets none.
    """
    given, calls = _step_with_closure(build, give_it=True)
    plain, _ = _step_with_closure(build, give_it=False)
    if calls != STEPS:
        return f"it calls the closure {calls / STEPS:g} times in a step"
    return "" if torch.equal(given, plain) else "its step with a closure is another one than without"


def _step_with_closure(build: Build, give_it: bool) -> tuple[torch.Tensor, int]:
    """Return where a small matrix ends, and how often the closure was called by the class."""
    parameter, calls = nn.Parameter(torch.linspace(-1.0, 1.0, 12).view(4, 3)), 0
    optimizer = build([[parameter]])

    def closure() -> float:
        nonlocal calls
        calls += 1
        parameter.grad = 2 * parameter.detach()
        return float(parameter.detach().square().sum())

    for _ in range(STEPS):
        if give_it:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return parameter.detach(), calls
