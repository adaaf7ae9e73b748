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


def require_no_other(model: nn.Module) -> None:
    """Raises: ValueError for a module that stores more in its state_dict than is saved here."""
    for name, module in model.named_modules():
        if type(module)._save_to_state_dict is nn.Module._save_to_state_dict:
            continue
        entries: dict[str, Any] = {}
        module._save_to_state_dict(entries, "", True)
        stored = [*module._parameters.values(), *module._buffers.values()]
        for key, value in entries.items():
            if key != "_extra_state" and not any(value is each for each in stored):
                raise ValueError(
                    f"module {name or 'the model'} ({type(module).__name__}) stores {key} in its state_dict "
                    "by a _save_to_state_dict of its own, and a checkpoint would lose it: register it as a "
                    "buffer, or return it from get_extra_state()"
                )


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
