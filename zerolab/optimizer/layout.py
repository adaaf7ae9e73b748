"""Layout: from a model as its author wrote it to flat units, cut as the stage says, one unit at a time."""

from collections.abc import Iterator

from torch import nn

from zerolab.collectives import Comm
from zerolab.engine.scopes import Scope
from zerolab.optimizer.materialise import materialise_buffers, materialise_scope
from zerolab.precision import PRECISIONS, Precision
from zerolab.stages.base import Stage
from zerolab.unit import FlatUnit


def lay_out(
    model: nn.Module, scopes: list[Scope], comm: Comm, stage: Stage, precision: Precision
) -> list[FlatUnit]:
    """Move all parameters into flat units, as rank 0 has them, and cut each unit before the next is made.

    So at stage 3 no more than one of them is whole beside the shards, and a model on the meta device can be
    larger than any rank.

    Raises: ValueError where a module on the meta device does not say how it starts.
    """
    exact = _kept_exact(model)
    units: list[FlatUnit] = []
    materialise_buffers(model, comm.device)
    for scope in scopes:
        materialise_scope(scope, comm.device)
        for name, parameters in _kinds(scope, exact):
            own = PRECISIONS["fp32"] if id(parameters[0][1]) in exact else precision
            unit = FlatUnit(name, len(units), parameters, comm.world_size, own)
            comm.broadcast(unit.flat, unit)
            stage.setup(unit)
            scope.units.append(unit)
            units.append(unit)
    return units


def _kinds(scope: Scope, exact: set[int]) -> Iterator[tuple[str, list[tuple[str, nn.Parameter]]]]:
    """A scope's parameters by what a flat buffer has one of: trainable or frozen, dtype, device."""
    kinds: dict[tuple, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in scope.parameters:
        key = (not parameter.requires_grad, parameter.dtype, parameter.device, id(parameter) in exact)
        kinds.setdefault(key, []).append((name, parameter))
    for (frozen, dtype, *_), parameters in kinds.items():
        yield (
            f"{scope.name} (frozen {str(dtype).removeprefix('torch.')})" if frozen else scope.name,
            parameters,
        )


def _kept_exact(model: nn.Module) -> set[int]:
    """The parameters, by id, of modules that keep running statistics: BatchNorm stays in fp32.

    Its statistics are means over many steps, which 16 bits cannot hold, and its kernels take weights and
    statistics in one dtype, whatever their input's.
    """
    return {
        id(parameter)
        for module in model.modules()
        if getattr(module, "running_mean", None) is not None
        for parameter in module.parameters(recurse=False)
    }
