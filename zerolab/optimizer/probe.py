"""Probe: run an optimizer on slices to find whether it can be sharded.

ZeRO gives each rank a slice of every parameter, cut at any element, and updates one unit after the other.
That is correct only for an optimizer whose update of an element depends on nothing but the history of that
element and the number of steps. Adam, SGD with momentum and RMSprop are such optimizers. LBFGS (one curvature
for all parameters), Muon (whole matrices), Adafactor (means of rows and columns) and AdamP (the angle between
gradient and weights) are not. A list of names would miss all others, so the probe runs each optimizer twice,
on whole parameters in one optimizer and on slices in several, and compares the bits.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch

from zerolab.optimizer.groups import options_of
from zerolab.optimizer.trial import APART, PLANS, TOGETHER, Held, Places, Plan, Trial, gradients

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
_OTHER_ARGUMENTS = (
    "ZeRO builds it from parameter groups, as in Adam([{'params': [...]}], lr=0.1): pass a class that takes "
    "them and wraps no model or other optimizer"
)
OWN_KEYWORDS = (
    *("stage", "params", "units", "precision", "process_group", "prefetch", "reduces_in_flight"),
    *("bucket_bytes", "tensor_parallel", "offload", "offload_dir"),
)
_known: dict[tuple[type, str], float] = {}


class _Refused(Exception):
    """Why an optimizer cannot be sharded, and what to do about it."""

    def __init__(self, reason: str, way_out: str = _OTHER_CLASS):
        self.reason, self.way_out = reason, way_out


def state_bytes_per_parameter(
    optimizer_class: type[torch.optim.Optimizer], defaults: dict, options: dict | None = None
) -> float:
    """Bytes of state the optimizer keeps for each fp32 parameter: the K of an fp32 run, 8 for Adam.

    Args: options: what a parameter group has besides the ``defaults``, or instead of them.
    Raises: TypeError if it is no optimizer class; ValueError if it cannot be sharded; the optimizer's own
        TypeError or ValueError about its keywords, with ZeroOptimizer's for one that it does not know.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        given = repr(optimizer_class)
        if isinstance(optimizer_class, torch.optim.Optimizer):
            given = f"an object of class {type(optimizer_class).__name__}"  # its repr takes many lines
        raise TypeError(
            f"optimizer_class is {given}, not a torch.optim.Optimizer class: pass the class "
            "and its keywords apart, as in ZeroOptimizer(model, torch.optim.AdamW, lr=3e-4)"
        )
    defaults, options = _without_implementation(defaults), _without_implementation(options or {})
    key = optimizer_class, repr((sorted(defaults.items()), sorted(options.items())))
    if key not in _known:

        def build(groups: list[list]) -> torch.optim.Optimizer:
            own = [deepcopy(options) | {"params": each} for each in groups]
            return optimizer_class(own, **deepcopy(defaults))

        with _on_the_cpu(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            try:
                _check_keywords(optimizer_class, defaults, options)
                _known[key] = max([_probe(partial(Trial, build, plan), plan) for plan in PLANS])
            except _Refused as refusal:
                message = f"{optimizer_class.__name__} cannot be sharded: {refusal.reason}. {refusal.way_out}"
                raise ValueError(message) from refusal.__cause__
    return _known[key]


def state_bytes_of_groups(
    optimizer_class: type[torch.optim.Optimizer], defaults: dict, groups: list[dict]
) -> dict[int, float]:
    """The same for the parameters of some groups with their options, by id. Raises: as above."""
    state_bytes_per_parameter(optimizer_class, defaults)
    costs = [state_bytes_per_parameter(optimizer_class, defaults, options_of(group)) for group in groups]
    return {id(p): cost for group, cost in zip(groups, costs, strict=True) for p in group["params"]}


def _on_the_cpu() -> AbstractContextManager:
    """For a user who set another default device. Otherwise no context: it costs time at every operation."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _without_implementation(keywords: dict) -> dict:
    return {key: value for key, value in keywords.items() if key not in _IMPLEMENTATIONS}


def _check_keywords(optimizer_class: type, defaults: dict, options: dict) -> None:
    """Let the optimizer check its keywords. It checks no options of groups, so these are keywords here."""
    known = inspect.signature(optimizer_class).parameters
    keywords = defaults | {key: value for key, value in options.items() if key in known}
    group = options | {"params": [torch.ones(2, 2, dtype=torch.float32, requires_grad=True)]}
    try:
        optimizer_class([group], **keywords)
    except TypeError as error:
        if "unexpected keyword argument" in str(error):
            raise TypeError(f"{error}. ZeroOptimizer's own keywords are {', '.join(OWN_KEYWORDS)}") from None
        raise
    except AttributeError as error:
        raise _Refused(f"it does not take parameter groups ({_shown(error)})", _OTHER_ARGUMENTS) from error


def _probe(make: Callable[[Places], Trial], plan: Plan) -> float:
    """Step whole parameters and slices of them side by side; bytes of state for each element."""
    whole = _try(partial(make, TOGETHER), "it does not take parameters of different shapes in two groups")
    sharded = _try(partial(make, plan.sharded), "it does not take a parameter that was cut")
    for step, kind in enumerate(plan.kinds):
        given = gradients(kind, step, whole.weights())
        _try(partial(whole.step, given), "its step failed on plain gradients")
        _try(partial(sharded.step, given), "its step failed on slices of parameters, which may be empty")
        if not _equal(whole.weights(), sharded.weights()):
            raise _Refused(f"{_cause(make, plan, step)} (seen at step {step + 1}, with gradients: {kind})")
    for each in sharded.held:
        _compare_groups(whole.held[each.index].group, each.group)
    for each in whole.held:
        _compare_states(each, [piece for piece in sharded.held if piece.index == each.index])
    if whole.optimizers[0].state.keys() - {each.tensor for each in whole.held}:
        raise _Refused("it keeps state that belongs to no parameter", _OTHER_STATE)
    matrix = whole.held[0]
    tensors = [value for value in matrix.state.values() if isinstance(value, torch.Tensor) and value.dim()]
    return sum(tensor.nbytes for tensor in tensors) / matrix.tensor.numel()


def _try(action: Callable[[], Any], reason: str) -> Any:
    try:
        return action()
    except Exception as error:
        raise _Refused(f"{reason} ({_shown(error)})") from error


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")


def _cause(make: Callable[[Places], Trial], plan: Plan, step: int) -> str:
    """Find why slices differ: step whole parameters in separate optimizers."""
    runs = [make(TOGETHER), make(TOGETHER), make(APART)]
    for number, kind in enumerate(plan.kinds[: step + 1]):
        for run in runs:
            run.step(gradients(kind, number, run.weights()))
    expected, again, apart = (run.weights() for run in runs)
    if not _equal(expected, again):
        return "it draws random numbers, and every rank would draw others"
    if not _equal(expected, apart):
        return "its update of a parameter depends on its other parameters"
    return "updating a tensor in pieces gave other numbers than updating it whole"


def _compare_groups(whole: dict, sharded: dict) -> None:
    """What an optimizer writes into its groups must be the same in all: one of them is shown and saved."""
    expected, found = options_of(whole), options_of(sharded)
    for key in expected | found:
        if key not in expected or key not in found or not _equal(expected[key], found[key]):
            raise _Refused(f"the {key} that it keeps in a parameter group depends on which parameters it has")


def _compare_states(whole: Held, pieces: list[Held]) -> None:
    """State has to be one number, the same for every slice, or one number for each element."""
    for piece in pieces:
        if keys := sorted(map(str, whole.state.keys() ^ piece.state.keys())):
            raise _Refused(f"its state {keys[0]!r} is kept for some slices and not for others", _OTHER_STATE)
        for key, value in piece.state.items():
            if not _storable(value, piece.tensor):
                raise _Refused(f"its state {key!r} is {_described(value)}", _OTHER_STATE)
    for key, value in whole.state.items():
        found = [piece.state[key] for piece in pieces]
        if isinstance(found[0], torch.Tensor) and found[0].dim():
            value, found = value.reshape(-1), [torch.cat([each.reshape(-1) for each in found])]
        if not all(_equal(value, each) for each in found):
            raise _Refused(f"its state {key!r} differs between slices and a whole parameter")


def _storable(value: Any, tensor: torch.Tensor) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 or value.shape == tensor.shape
    if isinstance(value, (list, tuple)):
        return all(_storable(each, tensor) and not isinstance(each, torch.Tensor) for each in value)
    return isinstance(value, _PLAIN)


def _described(value: Any) -> str:
    shape = f"tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    return f"a {shape or type(value).__name__}"


def _equal(first: Any, second: Any) -> bool:
    """Whether two values are the same, NaN too; objects that are no numbers need only be of one type."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.shape == second.shape and bool(
            ((first == second) | first.isnan() & second.isnan()).all()
        )
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_equal, first, second))
    if isinstance(first, _PLAIN) and isinstance(second, _PLAIN):
        return first == second or (first != first and second != second)
    return type(first) is type(second)
