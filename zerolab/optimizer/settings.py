"""Settings: check the arguments of ZeroOptimizer before the model is changed."""

import inspect
from enum import Enum
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import nn

from zerolab.engine.units import Unit
from zerolab.optimizer.models import refuse_engaged, refuse_model


def refuse_inference_mode(call: str) -> None:
    """Raises: RuntimeError inside torch.inference_mode(), where what a call makes can never be updated."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{call} is called inside torch.inference_mode(): tensors that are made there can never be "
            "updated outside. Call it outside; with torch.no_grad() in its place nothing changes for training"
        )


def check_settings(model: nn.Module, prefetch: int, reduces_in_flight: int, bucket_bytes: int | None) -> None:
    """Refuse a model that cannot be trained, and settings out of bounds. Raises: TypeError, ValueError."""
    refuse_inference_mode("ZeroOptimizer()")
    refuse_engaged(model)
    for name, value in (("prefetch", prefetch), ("reduces_in_flight", reduces_in_flight)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(
                f"{name} is {value!r}: pass a whole number, 0 to wait for each collective or more to overlap"
            )
    if bucket_bytes is not None:
        _check_bucket(bucket_bytes)
    refuse_model(model)


def _check_bucket(bucket_bytes: int) -> None:
    """Refuse a bucket that holds no element. Raises: TypeError, ValueError."""
    way_out = (
        f"bucket_bytes is {bucket_bytes!r}: pass a whole number of at least 4, the bytes of the fp32 element "
        "in which gradients are added up, or None for scratch as large as a unit"
    )
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int):
        raise TypeError(way_out)
    if bucket_bytes < 4:
        raise ValueError(way_out)


def require_plain_options(options: dict) -> None:
    """Refuse keywords that are objects with contents of their own: each stock optimizer gets a copy of them.

    What is written to the object later would be lost. Raises: TypeError.
    """
    for key, value in options.items():
        if isinstance(value, (nn.Module, nn.Parameter, set)) or _has_contents(value):
            raise TypeError(
                f"the keyword {key} is a {type(value).__name__}. Each rank gives it to several optimizers, "
                "as copies, so later changes of it would be lost: pass numbers, strings, tensors or dicts of "
                "them"
            )


def _has_contents(value: Any) -> bool:
    """Whether it is an object whose attributes can be changed, and no function, class or tensor."""
    if callable(value) or isinstance(value, (torch.Tensor, Enum)) or value.__class__.__module__ == "numpy":
        return False
    return bool(getattr(value, "__dict__", None))


def device_of(model: nn.Module) -> torch.device:
    """The one device that all parameters are on, apart from those on the meta device; that, if all are.

    Raises: ValueError where they are on several.
    """
    devices = {p.device: name for name, p in model.named_parameters() if not p.is_meta}
    if len(devices) > 1:
        (first, name), (second, other), *_ = devices.items()
        raise ValueError(
            f"parameter {name} is on {first} and {other} on {second}: move the whole model to one device, as "
            "with model.to(zerolab.device()), before building the optimizer"
        )
    return next(iter(devices), torch.device("meta"))


def with_fused(optimizer_class: type, defaults: dict, groups: list[dict], device: torch.device) -> dict:
    """``defaults`` with ``fused=True`` for Adam and AdamW on a GPU, where nobody chose an implementation.

    It updates everything in one kernel. Its last bits are not those of torch's own default, so it is not
    chosen under deterministic algorithms, where the bits are those of a plain loop.
    """
    chosen = any(name in options for options in (defaults, *groups) for name in _IMPLEMENTATIONS)
    adam = isinstance(optimizer_class, type) and issubclass(
        optimizer_class, (torch.optim.Adam, torch.optim.AdamW)
    )
    if device.type != "cuda" or not adam or chosen or torch.are_deterministic_algorithms_enabled():
        return defaults
    takes_it = "fused" in inspect.signature(optimizer_class).parameters
    return defaults | {"fused": True} if takes_it else defaults


_IMPLEMENTATIONS = ("fused", "foreach", "capturable", "differentiable")


def choose(name: str, value, choices: dict):
    """The entry of ``choices`` for ``value``. Raises: ValueError, with the choices, for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, str)) or value not in choices:
        by_name = ", and pass the optimizer's settings by name, as lr=0.1" if isinstance(value, float) else ""
        raise ValueError(f"{name} is {value!r}: choose from {', '.join(map(repr, choices))}{by_name}")
    return choices[value]


def signature(
    units: list[Unit],
    stage: type,
    groups: str,
    precision: str,
    prefetch: int,
    bucket_bytes: int | None,
    optimizer_class: type,
    defaults: dict,
) -> list[str]:
    """All settings that must be equal on every rank, a line for each, so that a difference can be named.

    Args: groups: the settings of hybrid sharding, in words, or "".
    """
    parameters = [f"{name} {_form(p)} in unit {unit.name}" for unit in units for name, p in unit.parameters]
    keywords = f"{full_name(optimizer_class)}({keywords_in_text(defaults)})"
    return [
        f"{stage.__name__}{groups} in {precision} with {keywords}",
        f"prefetch {prefetch}",
        f"bucket_bytes {bucket_bytes}",
        *parameters,
    ]


def full_name(kind: type) -> str:
    """Return the class's name with its module, because two classes may have one name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _form(parameter: nn.Parameter) -> str:
    """Shape, dtype, and strides unless contiguous, because the flat buffer keeps the order of memory."""
    frozen = "" if parameter.requires_grad else " frozen"
    strides = "" if parameter.is_contiguous() else f" with strides {parameter.stride()}"
    return f"{tuple(parameter.shape)} {parameter.dtype}{frozen}{strides}"


def group_signature(model: nn.Module, groups: list[dict]) -> list[str]:
    """Return the parameter groups in lines, to be compared with those of other ranks."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    members = [", ".join(names[id(p)] for p in group["params"]) for group in groups]
    return describe_groups(groups, members)


def describe_groups(groups: list[dict], members: list[str]) -> list[str]:
    """Return a line for each group's parameters and each of its hyperparameters as they are now."""
    lines = []
    for index, (group, names) in enumerate(zip(groups, members, strict=True)):
        lines.append(f"group {index} of {names}")
        lines += [f"group {index} with {each}" for each in _keywords(group)]
    return lines


def keywords_in_text(keywords: dict) -> str:
    """Return hyperparameters in one line."""
    return ", ".join(_keywords(keywords))


def _keywords(keywords: dict) -> list[str]:
    """Hyperparameters as text, without the parameters and the options that only a scheduler uses."""
    kept = {key: value for key, value in keywords.items() if key not in ("params", "initial_lr")}
    return [f"{key}={_shown(value)}" for key, value in sorted(kept.items())]


def _shown(value) -> str:
    """Return a number or text as it is, in tensors, arrays and lists too; the type's name for anything else.

    The text of a function contains its address, and a set has no fixed order: both differ between ranks that
    agree. A tensor on a GPU is not read, because the CPU would wait for the device.
    """
    if isinstance(value, torch.Tensor):
        where = value.device.type
        return str(value.tolist()) if where == "cpu" else f"a tensor {tuple(value.shape)} on {where}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_shown, value))})"
    if isinstance(value, (np.ndarray, np.generic)):
        return _shown(value.tolist())
    if value is None or isinstance(value, (Number, str)):
        return str(value)
    return f"a {type(value).__name__}"
