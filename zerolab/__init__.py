"""zerolab: ZeRO stages 0-3, small enough to read in a day, real enough to train with.

The face of the package is this list of names; each is imported on first use, so that
``zerolab.memory`` and its neighbours answer without loading torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and the documentation, which do not run __getattr__
    from zerolab.checkpoint import export as export
    from zerolab.checkpoint import load as load
    from zerolab.checkpoint import save as save
    from zerolab.checkpointing import Checkpointing as Checkpointing
    from zerolab.devices import device as device
    from zerolab.launcher import LaunchTimeout as LaunchTimeout
    from zerolab.launcher import WorkerError as WorkerError
    from zerolab.launcher import init_process_group as init_process_group
    from zerolab.launcher import launch as launch
    from zerolab.optimizer import ZeroOptimizer as ZeroOptimizer
    from zerolab.optimizer import matrices_by as matrices_by
    from zerolab.parity import verify as verify
    from zerolab.rehearsal import rehearse as rehearse
    from zerolab.simulation import Cluster as Cluster
    from zerolab.simulation import Simulation as Simulation
    from zerolab.simulation import simulate as simulate
    from zerolab.tensor_parallel import TensorParallel as TensorParallel
    from zerolab.tensor_parallel import parallelize as parallelize
    from zerolab.trace import Event as Event
    from zerolab.trace import Trace as Trace

    __version__: str

_MODULE_OF = {
    "launch": "launcher",
    "init_process_group": "launcher",
    "WorkerError": "launcher",
    "LaunchTimeout": "launcher",
    "device": "devices",
    "ZeroOptimizer": "optimizer",
    "matrices_by": "optimizer",
    "Checkpointing": "checkpointing",
    "TensorParallel": "tensor_parallel",
    "parallelize": "tensor_parallel",
    "save": "checkpoint",
    "load": "checkpoint",
    "export": "checkpoint",
    "verify": "parity",
    "rehearse": "rehearsal",
    "simulate": "simulation",
    "Cluster": "simulation",
    "Simulation": "simulation",
    "Trace": "trace",
    "Event": "trace",
}
_ARITHMETIC = ("memory", "cost", "residual", "step_time", "presets", "paper")
_MODULES = (*_ARITHMETIC, "trace", "ring", "collectives", "models", "data", "arena", "course")

__all__ = ["__version__", *_MODULE_OF, *_MODULES]


def _version() -> str:
    """Return the version of this clone's pyproject.toml, or of the installed package."""
    import tomllib
    from importlib.metadata import version
    from pathlib import Path

    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text("utf-8"))["project"] if pyproject.exists() else {}
    return project["version"] if project.get("name") == "zerolab" else version("zerolab")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"zerolab.{_MODULE_OF[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"zerolab.{name}")
    raise AttributeError(f"module 'zerolab' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
