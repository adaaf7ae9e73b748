"""Save and load what modules return from ``get_extra_state``, for each rank."""

from typing import Any

from torch import nn


def keepers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have extra state, by name.

    Raises: ValueError for one that could not take it back.
    """
    found = {name: module for name, module in model.named_modules() if _defines(module, "get_extra_state")}
    for name, module in found.items():
        if not _defines(module, "set_extra_state"):
            raise ValueError(
                f"module {name or 'the model'} ({type(module).__name__}) has get_extra_state() and no "
                "set_extra_state(), so that no load could give its state back: define both or none"
            )
    return found


def collect(model: nn.Module) -> dict[str, Any]:
    """Return what the modules keep, by their names."""
    return {name: module.get_extra_state() for name, module in keepers(model).items()}


def restore(model: nn.Module, states: dict[str, Any]) -> None:
    """Give the modules back what `collect` found. Tensors in it are on the CPU."""
    for name, module in keepers(model).items():
        module.set_extra_state(states[name])


def key_of(rank: int) -> str:
    """Return the name under which a rank's extra state is stored."""
    return f"extra_state.{rank}"


def _defines(module: nn.Module, method: str) -> bool:
    return getattr(type(module), method) is not getattr(nn.Module, method)
