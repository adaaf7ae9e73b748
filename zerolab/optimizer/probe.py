"""Probe: whether an optimizer may be cut into pieces, found out by cutting one.

ZeRO hands each rank a slice of every parameter, cut wherever the flat buffer is, and updates unit by unit.
That is sound only for an optimizer whose update of an element depends on nothing but that element's own
history and the number of steps. Adam, SGD with momentum and RMSprop are such; LBFGS (one curvature for all),
Muon (whole matrices), Adafactor (row and column means) and AdamP (the gradient's angle to the weights) are
not. A list of names would miss every optimizer that is not in it, so each is run twice, on whole parameters
in one optimizer and on slices in several, and the bits compared.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch

from zerolab.optimizer.groups import options_of
from zerolab.optimizer.trial import APART, PLANS, TOGETHER, Held, Plan, Trial, gradients

_IMPLEMENTATIONS = ("foreach", "fused", "capturable")
"""Keywords that choose how an update is computed and not what it is; the probe runs torch's plain loop."""
_PLAIN = (bool, int, float, complex, str, type(None))
_OTHER_CLASS = (
    "ZeRO needs an elementwise update, one that treats each element by its own history alone: pass Adam, "
    "AdamW, SGD, RMSprop, Adagrad or another such class"
)
_OTHER_STATE = (
    "A checkpoint stores one value for a parameter, as a number or a tensor without dimensions, or a tensor "
    "of the parameter's shape: change the class to keep its state so, or pass another class"
)
_known: dict[tuple[type, str], float] = {}

_Make = Callable[[list[list[tuple]]], Trial]
"""Builds a trial with its parameters divided among optimizers in one way or another."""


class _Refused(Exception):
    """Why an optimizer cannot be sharded, and what to do about it."""

    def __init__(self, reason: str, way_out: str = _OTHER_CLASS):
        self.reason, self.way_out = reason, way_out


def state_bytes_per_parameter(
    optimizer_class: type[torch.optim.Optimizer], defaults: dict, options: dict | None = None
) -> float:
    """Bytes of state the optimizer keeps for each fp32 parameter: the K of an fp32 run, 8 for Adam.

    Args: options: what a parameter group has besides the ``defaults``, or instead of them.
    Raises: TypeError where it is no optimizer class; ValueError where it cannot be sharded; whatever the
        optimizer itself raises about its own keywords.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise TypeError(
            f"optimizer_class is {optimizer_class!r}, not a torch.optim.Optimizer class: pass the class "
            "and its keywords apart, as in ZeroOptimizer(model, torch.optim.AdamW, lr=3e-4)"
        )
    defaults, options = _without_implementation(defaults), _without_implementation(options or {})
    key = optimizer_class, repr((sorted(defaults.items()), sorted(options.items())))
    if key not in _known:
        with _on_the_cpu(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            _construct(optimizer_class, defaults, options)

            def build(groups: list[list]) -> torch.optim.Optimizer:
                own = [deepcopy(options) | {"params": each} for each in groups]
                return optimizer_class(own, **deepcopy(defaults))

            try:
                _known[key] = max([_probe(partial(Trial, build, plan), plan) for plan in PLANS])
            except _Refused as no:
                message = f"{optimizer_class.__name__} cannot be sharded: {no.reason}. {no.way_out}"
                raise ValueError(message) from no.__cause__
    return _known[key]


def _on_the_cpu() -> AbstractContextManager:
    """Where the user set another default device. Not always: the context costs time at every operation."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _without_implementation(keywords: dict) -> dict:
    return {key: value for key, value in keywords.items() if key not in _IMPLEMENTATIONS}


def _construct(optimizer_class: type, defaults: dict, options: dict) -> None:
    """Have the optimizer check its keywords itself. A group may also have options that are the user's own."""
    known = inspect.signature(optimizer_class).parameters
    matrix = torch.ones(2, 2, dtype=torch.float32, requires_grad=True)
    optimizer_class([matrix], **defaults | {key: value for key, value in options.items() if key in known})


def _probe(make: _Make, plan: Plan) -> float:
    """Step whole parameters and slices of them side by side; bytes of state for each element."""
    whole = _try(partial(make, TOGETHER), "it does not take parameters of different shapes in two groups")
    sharded = _try(partial(make, plan.sharded), "it does not take a parameter that was cut")
    for step, kind in enumerate(plan.kinds):
        given = gradients(kind, step, whole.weights())
        _try(partial(whole.step, given), "its step on plain gradients failed")
        _try(partial(sharded.step, given), "its step on slices of parameters, which may be empty, failed")
        if not _equal(whole.weights(), sharded.weights()):
            raise _Refused(f"{_cause(make, step)} (seen at step {step + 1}, with gradients: {kind})")
    for each in sharded.held:
        _compare_groups(whole.held[each.index].group, each.group)
    for each in whole.held:
        _compare_states(each, [piece for piece in sharded.held if piece.index == each.index])
    _refuse_other_state(whole)
    matrix = whole.held[0]
    tensors = [value for value in matrix.state.values() if isinstance(value, torch.Tensor) and value.dim()]
    return sum(tensor.nbytes for tensor in tensors) / matrix.tensor.numel()


def _try(what: Callable[[], Any], reason: str) -> Any:
    try:
        return what()
    except Exception as error:
        raise _Refused(f"{reason} ({type(error).__name__}: {error})") from error


def _cause(make: _Make, step: int) -> str:
    """Why slices got other numbers than whole parameters, by this step: found by cutting less."""
    expected = _weights_after(make, TOGETHER, step)
    if not _equal(expected, _weights_after(make, TOGETHER, step)):
        return "it draws random numbers, and every rank would draw others"
    if not _equal(expected, _weights_after(make, APART, step)):
        return "its update of a parameter depends on its other parameters"
    return "updating a tensor in pieces gave other numbers than updating it whole"


def _weights_after(make: _Make, places: list[list[tuple]], last: int) -> list[torch.Tensor]:
    trial = make(places)
    for step, kind in enumerate(trial.kinds[: last + 1]):
        trial.step(gradients(kind, step, trial.weights()))
    return trial.weights()


def _compare_groups(whole: dict, sharded: dict) -> None:
    """What an optimizer writes into its groups must be the same in all: one of them is shown and saved."""
    expected, found = options_of(whole), options_of(sharded)
    for key in expected | found:
        if key not in expected or key not in found or not _equal(expected[key], found[key]):
            raise _Refused(f"the {key} that it keeps in a parameter group depends on which parameters it has")


def _compare_states(whole: Held, pieces: list[Held]) -> None:
    """State has to be one number, the same for every slice, or one for each element."""
    for piece in pieces:
        if odd := sorted(map(str, whole.state.keys() ^ piece.state.keys())):
            raise _Refused(f"its state {odd[0]!r} is kept for some slices and not for others", _OTHER_STATE)
    for key, value in whole.state.items():
        found = [piece.state[key] for piece in pieces]
        for piece, each in zip(pieces, found, strict=True):
            if not _storable(each, piece.tensor):
                raise _Refused(f"its state {key!r} is {_described(each)}", _OTHER_STATE)
        if isinstance(found[0], torch.Tensor) and found[0].dim():
            value, found = value.reshape(-1), [torch.cat([each.reshape(-1) for each in found])]
        if not all(_equal(value, each) for each in found):
            raise _Refused(f"its state {key!r} is another for slices than for a whole parameter")


def _storable(value: Any, tensor: torch.Tensor) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 or value.shape == tensor.shape
    if isinstance(value, (list, tuple)):
        return all(_storable(each, tensor) and not isinstance(each, torch.Tensor) for each in value)
    return isinstance(value, _PLAIN)


def _described(value: Any) -> str:
    shape = f"tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    return f"a {shape or type(value).__name__}"


def _refuse_other_state(trial: Trial) -> None:
    tensors = {each.tensor for each in trial.held}
    for key in trial.optimizers[0].state:
        if key not in tensors:
            raise _Refused("it keeps state that belongs to no parameter", _OTHER_STATE)


def _equal(first: Any, second: Any) -> bool:
    """Whether two values are the same, NaN included; of other kinds than numbers, whether they may be."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if torch.equal(first, second) or first.shape != second.shape:
            return first.shape == second.shape
        return bool(((first == second) | (first != first) & (second != second)).all())
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_equal, first, second))
    if isinstance(first, _PLAIN) and isinstance(second, _PLAIN):
        return first == second or (first != first and second != second)
    return type(first) is type(second)
