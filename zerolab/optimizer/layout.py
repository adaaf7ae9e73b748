"""Layout: move a model's parameters into flat units and shard them by stage, one unit at a time."""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import nn

from zerolab.collectives import Comm
from zerolab.engine.states import UnitRun
from zerolab.engine.units import Unit
from zerolab.optimizer.axes import Axes
from zerolab.optimizer.materialise import materialise_buffers, materialise_unit
from zerolab.optimizer.offload import Offload
from zerolab.precision import PRECISIONS, Precision
from zerolab.stages.base import Stage
from zerolab.storages import MemoryMeter
from zerolab.unit import FlatUnit


def lay_out(
    model: nn.Module,
    units: list[Unit],
    comm: Comm,
    stage: Stage,
    precision: Precision,
    meter: MemoryMeter,
    axes: Axes,
    offload: Offload,
) -> list[UnitRun]:
    """Move all parameters into flat units, with rank 0's values, and shard each unit before the next is made.

    So at stage 3 a rank holds at most one whole unit and its shards, and a model on the meta device can be
    larger than the memory of a rank. Masters that are offloaded leave before the next unit is made.

    Raises: ValueError where a module on the meta device has no way to initialize itself.
    """
    exact = _kept_exact(model)
    runs, index = [], itertools.count()
    materialise_buffers(model, comm.device)
    for unit in units:
        materialise_unit(unit, comm.device)
        run = UnitRun(unit)
        for name, parameters in _kinds(unit, exact):
            own = PRECISIONS["fp32"] if id(parameters[0][1]) in exact else precision
            ranks = comm.world_size
            flat = FlatUnit(name, next(index), parameters, ranks, own, meter, replicas=ranks)
            comm.broadcast(flat.flat, flat)
            if axes.parallel is not None:
                for span in (each for each in flat.spans if each.parameter not in axes.splits):
                    axes.parallel.copy_from_rank_0(span.name, span.view(flat.flat))
            stage.setup(flat)
            offload.take_master(flat)
            run.flats.append(flat)
        runs.append(run)
    return runs


def bytes_to_offload(
    model: nn.Module,
    units: list[Unit],
    comm: Comm,
    stage: Stage,
    precision: Precision,
    state_bytes: dict[int, float],
) -> int:
    """Return how many bytes of masters and optimizer state this rank will have after `lay_out`.

    The stage shards each unit on the meta device, where that takes no memory, and changes nothing.
    Args: state_bytes: of each parameter that is optimized, by id: the bytes of state for each element.
    """
    exact, found = _kept_exact(model), 0.0
    for unit in units:
        for name, parameters in _kinds(unit, exact):
            own = PRECISIONS["fp32"] if id(parameters[0][1]) in exact else precision
            flat = FlatUnit(name, 0, _on_meta(parameters), comm.world_size, own)
            stage.setup(flat)
            if not flat.trainable:
                continue
            found += flat.master.nbytes if flat.has_own_master else 0
            for (_, parameter), span in zip(parameters, flat.spans, strict=True):
                part = span.within(flat.owned.start, flat.owned.stop)
                found += (part.stop - part.start) * state_bytes.get(id(parameter), 0.0)
    return math.ceil(found)


def _on_meta(parameters: list[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    shape_of = lambda p: nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    return [(name, shape_of(parameter)) for name, parameter in parameters]


def in_forward_order(runs: list[UnitRun]) -> list[FlatUnit]:
    """The order in which a forward pass most likely uses what they hold: that of `runs`, the root first."""
    return [flat for run in sorted(runs, key=lambda run: not run.is_root) for flat in run.flats]


def _kinds(unit: Unit, exact: set[int]) -> Iterator[tuple[str, list[tuple[str, nn.Parameter]]]]:
    """A unit's parameters by what a flat buffer has one of: trainable or frozen, dtype, device.

    Each has a name of its own, because ranks compare collectives by name.
    """
    kinds: dict[tuple, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in unit.parameters:
        key = (not parameter.requires_grad, parameter.dtype, parameter.device, id(parameter) in exact)
        kinds.setdefault(key, []).append((name, parameter))
    given: set[str] = set()
    for (frozen, dtype, *_), parameters in kinds.items():
        name = f"{unit.name} (frozen {str(dtype).removeprefix('torch.')})" if frozen else unit.name
        if name in given:
            name += " (kept in fp32)" if id(parameters[0][1]) in exact else " (not kept in fp32)"
        given.add(name)
        yield name, parameters


def _kept_exact(model: nn.Module) -> set[int]:
    """Return the parameters, by id, of modules that keep running statistics: BatchNorm stays in fp32.

    Its statistics are means over many steps, which 16 bits cannot hold, and its kernels take weights and
    statistics in one dtype, whatever their input's.
    """
    return {
        id(parameter)
        for module in model.modules()
        if getattr(module, "running_mean", None) is not None
        for parameter in module.parameters(recurse=False)
    }
