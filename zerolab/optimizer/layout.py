"""Layout: move a model's parameters into flat units and shard them by stage, one unit at a time."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from zerolab.collectives import Comm
from zerolab.engine.states import UnitRun
from zerolab.engine.units import Unit
from zerolab.optimizer.axes import Axes
from zerolab.optimizer.materialise import materialise_buffers, materialise_unit
from zerolab.optimizer.offload import Offload
from zerolab.optimizer.owners import choose_owners
from zerolab.optimizer.updates import Updates
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
    updates: Updates,
) -> list[UnitRun]:
    """Move all parameters into flat units, with rank 0's values, and shard each unit before the next is made.

    So at stage 3 a rank holds at most one whole unit and its shards, and a model on the meta device can be
    larger than the memory of a rank. Masters that are offloaded leave before the next unit is made.

    Raises: ValueError where a module on the meta device has no way to initialize itself.
    """
    buffers = Buffers(model, units, updates, stage.comm.world_size, precision)
    runs, index = [], itertools.count()
    materialise_buffers(model, comm.device)
    for unit in units:
        materialise_unit(unit, comm.device)
        run = UnitRun(unit)
        for buffer in buffers.of(unit):
            flat = buffer.flat_unit(next(index), stage.comm.world_size, comm.world_size, meter)
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
    updates: Updates,
) -> int:
    """Return how many bytes of masters and optimizer state this rank will have after `lay_out`.

    The stage shards each unit on the meta device, where that takes no memory, and changes nothing.
    """
    buffers, found = Buffers(model, units, updates, stage.comm.world_size, precision), 0.0
    for unit in units:
        for buffer in buffers.of(unit):
            flat = buffer.on_meta().flat_unit(0, stage.comm.world_size, comm.world_size)
            stage.setup(flat)
            if not flat.trainable:
                continue
            found += flat.master.nbytes if flat.has_own_master else 0
            for (_, parameter), span in zip(buffer.parameters, flat.spans, strict=True):
                part = span.within(flat.owned.start, flat.owned.stop)
                found += (part.stop - part.start) * updates.state_bytes(parameter)
    return math.ceil(found)


def in_forward_order(runs: list[UnitRun]) -> list[FlatUnit]:
    """The order in which a forward pass most likely uses what they hold: that of `runs`, the root first."""
    return [flat for run in sorted(runs, key=lambda run: not run.is_root) for flat in run.flats]


@dataclass
class Buffer:
    """Parameters of one unit that are in one flat buffer.

    Attributes:
        precision: in which they are trained.
        owners: of each, in ascending order, the rank that updates it whole; None where they are cut anywhere.
    """

    name: str
    parameters: list[tuple[str, nn.Parameter]]
    precision: Precision
    owners: list[int] | None

    def flat_unit(self, index: int, shards: int, replicas: int, meter: MemoryMeter | None = None) -> FlatUnit:
        """Move them into a flat buffer. Args: as of `FlatUnit`."""
        return FlatUnit(
            self.name, index, self.parameters, shards, self.precision, meter, replicas, self.owners
        )

    def on_meta(self) -> "Buffer":
        """The same without memory; the parameters stay where they are."""
        form = lambda p: nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        return replace(self, parameters=[(name, form(parameter)) for name, parameter in self.parameters])


class Buffers:
    """The parameters of a model by the flat buffer that they are in.

    All in one are trainable or all are frozen, and they have one dtype, device, precision and optimizer.
    """

    def __init__(
        self, model: nn.Module, units: list[Unit], updates: Updates, ranks: int, precision: Precision
    ):
        self._exact, self._updates, self._precision = _kept_exact(model), updates, precision
        whole = [[p for _, p in unit.parameters if self._needs_whole(p)] for unit in units]
        self._owners = choose_owners(whole, ranks)

    def _needs_whole(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad and self._updates.of(parameter).needs_whole

    def of(self, unit: Unit) -> Iterator[Buffer]:
        """The buffers of one unit."""
        found: dict[tuple, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in unit.parameters:
            trainable, exact = parameter.requires_grad, id(parameter) in self._exact
            update = self._updates.of(parameter) if trainable else None
            key = (trainable, parameter.dtype, parameter.device, exact, update)
            found.setdefault(key, []).append((name, parameter))
        names: set[str] = set()
        for (_, _, _, exact, update), parameters in found.items():
            name, owners = self._name(unit, parameters[0][1], names), None
            names.add(name)
            if update is not None and update.needs_whole:
                parameters.sort(key=lambda each: self._owners[id(each[1])])
                owners = [self._owners[id(parameter)] for _, parameter in parameters]
            yield Buffer(name, parameters, PRECISIONS["fp32"] if exact else self._precision, owners)

    def _name(self, unit: Unit, parameter: nn.Parameter, taken: set[str]) -> str:
        """The unit's name, and what is special about these parameters.

        No two have one name, because ranks compare collectives by name.
        """
        special = []
        if not parameter.requires_grad:
            special.append(f"frozen {str(parameter.dtype).removeprefix('torch.')}")
        elif (update := self._updates.of(parameter)) is not self._updates.of_groups[0]:
            special.append(update.name)
        name = lambda: f"{unit.name} ({', '.join(special)})" if special else unit.name
        if name() in taken:
            special.append("kept in fp32" if id(parameter) in self._exact else "not kept in fp32")
        if name() in taken:
            special.append(str(len(taken)))
        return name()


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
