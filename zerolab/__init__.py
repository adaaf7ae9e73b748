"""zerolab: ZeRO stages 0-3, small enough to read in a day, real enough to train with.

The face of the package is this list of names; each is imported on first use, so that
``zerolab.memory`` and ``zerolab.cost`` answer without loading torch.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "launch": "launcher",
    "init_process_group": "launcher",
    "WorkerError": "launcher",
    "LaunchTimeout": "launcher",
    "device": "devices",
    "ZeroOptimizer": "optimizer",
    "save": "checkpoint",
    "load": "checkpoint",
    "export": "checkpoint",
    "verify": "parity",
    "rehearse": "rehearsal",
    "Trace": "trace",
    "Event": "trace",
}
_MODULES = ("memory", "cost", "presets", "trace", "ring", "collectives", "models", "data", "course")

__all__ = ["__version__", *_HOMES, *_MODULES]


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"zerolab.{_HOMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"zerolab.{name}")
    raise AttributeError(f"module 'zerolab' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
