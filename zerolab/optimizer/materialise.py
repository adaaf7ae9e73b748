"""Materialise: memory and start values for modules that were built on the meta device, a unit at a time.

``with torch.device("meta"): model = GPT(...)`` makes shapes without contents, so it takes no memory, however
large the model. PyTorch's convention for filling them in later is a module's ``reset_parameters()``, which
writes the parameters and buffers that the module itself holds; all of torch.nn has it.
"""

from typing import Any, cast

import torch
from torch import nn

from zerolab.engine.units import Unit


@torch.no_grad()
def materialise_unit(unit: Unit, device: torch.device) -> None:
    """Give every module that holds one of the unit's parameters its start values. Memory: the unit, whole.

    Raises: ValueError for a module without reset_parameters, or where that leaves something unwritten.
    """
    ours = {id(parameter) for _, parameter in unit.parameters if _lacks_memory(parameter, device)}
    for name, module in unit.module.named_modules(prefix=unit.name):
        if any(id(parameter) in ours for parameter in module.parameters(recurse=False)):
            _materialise(name, module, device)


@torch.no_grad()
def materialise_buffers(model: nn.Module, device: torch.device) -> None:
    """The same for modules that hold nothing but buffers, as a table of rotary angles. Raises: as above."""
    for name, module in model.named_modules():
        if not module._parameters and any(_lacks_memory(b, device) for b in module.buffers(recurse=False)):
            _materialise(name, module, device)


def _lacks_memory(tensor: torch.Tensor, device: torch.device) -> bool:
    """A rehearsal's device is the meta device itself: there nothing is to be given memory."""
    return tensor.is_meta and device.type != "meta"


def _materialise(name: str, module: nn.Module, device: torch.device) -> None:
    where = f"{name} ({type(module).__name__}) is on the meta device"
    if not hasattr(module, "reset_parameters"):
        raise ValueError(
            f"{where} and does not say how it starts: give the class a reset_parameters() that fills its own "
            "parameters and buffers, or build the model with memory"
        )
    parameters = {key: p for key, p in module._parameters.items() if p is not None and p.is_meta}
    buffers = {key: b for key, b in module._buffers.items() if b is not None and b.is_meta}
    for parameter in parameters.values():
        torch.utils.swap_tensors(
            parameter, nn.Parameter(_unwritten(parameter, device), parameter.requires_grad)
        )
    for key, buffer in buffers.items():
        module._buffers[key] = _unwritten(buffer, device)
    cast(Any, module).reset_parameters()
    for key in [*parameters, *buffers]:
        if _has_nan(getattr(module, key)):
            raise ValueError(f"{where} and its reset_parameters() leaves {key} unwritten: have it fill {key}")


def _unwritten(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for it: NaN wherever nothing is written, or 0 where there is no NaN."""
    absent = float("nan") if tensor.is_floating_point() else 0
    return torch.full_like(tensor, absent, device=device, requires_grad=False)


def _has_nan(tensor: torch.Tensor) -> bool:
    return bool(tensor.isnan().any())
