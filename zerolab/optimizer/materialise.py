"""Materialise: allocate and initialize modules that were built on the meta device, one unit at a time.

``with torch.device("meta"): model = GPT(...)`` makes tensors without contents, so a model of any size takes
no memory. PyTorch's convention for filling them later is a module's ``reset_parameters()``, which writes the
parameters and buffers of the module itself; all modules of torch.nn have it.
"""

from typing import Any, cast

import torch
from torch import nn

from zerolab.engine.units import Unit


@torch.no_grad()
def materialise_unit(unit: Unit, device: torch.device) -> None:
    """Initialize every module that holds one of the unit's parameters. Memory: the unit, whole.

    Raises: ValueError for a module without reset_parameters, or where that leaves something unwritten.
    """
    ours = {id(parameter) for _, parameter in unit.parameters if _lacks_memory(parameter, device)}
    for name, module in unit.module.named_modules(prefix=unit.name):
        if any(id(parameter) in ours for parameter in module.parameters(recurse=False)):
            _materialise(name, module, device)


@torch.no_grad()
def materialise_buffers(model: nn.Module, device: torch.device) -> None:
    """Initialize modules that hold only buffers, such as a table of rotary angles. Raises: as above."""
    for name, module in model.named_modules():
        if not module._parameters and any(_lacks_memory(b, device) for b in module.buffers(recurse=False)):
            _materialise(name, module, device)


def _lacks_memory(tensor: torch.Tensor, device: torch.device) -> bool:
    """Not in a rehearsal, whose device is the meta device itself."""
    return tensor.is_meta and device.type != "meta"


def _materialise(name: str, module: nn.Module, device: torch.device) -> None:
    where = f"{name} ({type(module).__name__}) is on the meta device"
    if not hasattr(module, "reset_parameters"):
        raise ValueError(
            f"{where} and has no reset_parameters() to initialize it: give the class one that fills its own "
            "parameters and buffers, or build the model on a device with memory"
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
    """New memory for it, filled with NaN to find what is never written; 0 for a dtype without NaN."""
    absent = float("nan") if tensor.is_floating_point() else 0
    return torch.full_like(tensor, absent, device=device, requires_grad=False)


def _has_nan(tensor: torch.Tensor) -> bool:
    return bool(tensor.isnan().any())
