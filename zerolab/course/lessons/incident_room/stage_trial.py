"""Lesson 09: what a rank sees of a stage that the reader wrote, in two steps of training.

All of this runs in the worker processes.
"""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import zerolab
from zerolab.course.alive import Alive, first_name, kept_by, nbytes
from zerolab.course.evidence import sum_of
from zerolab.course.lessons.incident_room.installed import install
from zerolab.events import CONTROL, Event
from zerolab.measure import MeasuredStates
from zerolab.memory import ModelStates
from zerolab.optimizer import ZeroOptimizer
from zerolab.parity import compute_deterministically
from zerolab.parity.parity import random_tokens, small_gpt
from zerolab.parity.prediction import predict
from zerolab.stages.base import Stage
from zerolab.unit.sharded import ReducedGradient, as_plain_tensors

SGD: dict[str, Any] = {"lr": 0.5, "momentum": 0.9}
STEPS = 2


class Seen(NamedTuple):
    """What a rank was left with.

    Attributes:
        steps: how many steps were taken before the parameters were wrong.
        equal: whether the parameters are bit for bit those of one process.
        off: the largest difference.
        fits: the mistakes that lead to these parameters after the first step.
        memory, right_memory: in bytes.
        right_traffic: the payload of a step, in Ψ.
        passes: the same by collective, as it was.
        waiting: collectives that nobody has waited for.
        copies: the bytes that the stage or its units keep beside the units' buffers, and where.
        elsewhere: of the first unit of which the rank owns another range than it should: its name, that
            range, and the right one.
    """

    steps: int
    equal: bool
    off: float
    fits: list[str]
    memory: MeasuredStates
    right_memory: ModelStates
    right_traffic: float
    passes: dict[str, float]
    waiting: list[str]
    copies: tuple[int, str | None]
    elsewhere: tuple[str, range, range] | None = None


def trials(stages: Mapping[int, type[Stage]]) -> dict[int, Seen]:
    """One stage after the other, by number."""
    compute_deterministically()  # the bits of one process on a GPU too
    return {number: trial(stage_class, number) for number, stage_class in stages.items()}


def trial(stage_class: type[Stage], number: int) -> Seen:
    """Train two steps with the stage, and in one process; stop after a step with wrong values."""
    started = install(stage_class, number)
    torch.manual_seed(0)
    model = small_gpt().to(zerolab.device())
    alone = OneProcess(model)
    with as_plain_tensors():  # the last trial's parameters may be here still
        alive = Alive()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=number, **SGD)
    for step in range(STEPS):
        events = _train(optimizer, step)
        held, copies = optimizer.memory(), _copies(optimizer, alive, alone)
        alone.train(step)
        with optimizer.full_params():
            got = _flat(model)
        if _anywhere(not torch.equal(got, alone.after)):
            break
    fits = alone.mistakes_in(got, *_places(optimizer, model)) if step == 0 else []
    predicted, psi_bytes = predict(optimizer, number), 4 * len(got)
    return Seen(
        steps=step + 1,
        equal=torch.equal(got, alone.after),
        off=(got - alone.after).abs().nan_to_num(nan=float("inf")).max().item(),
        fits=fits,
        memory=held,
        right_memory=predicted.memory,
        right_traffic=predicted.traffic.logical_bytes / psi_bytes,
        passes={op: nbytes / psi_bytes for op, nbytes in _payload(events).items()},
        waiting=[name for name, work in started if work.waits],
        copies=copies,
        elsewhere=_elsewhere(optimizer, number),
    )


def _train(optimizer: ZeroOptimizer, step: int) -> list[Event]:
    """One step; what it sent, without what looking at whole parameters has sent before it."""
    earlier = len(optimizer.trace.step(step))
    optimizer.zero_grad()
    optimizer.model(*_tokens(step, dist.get_rank())).backward()
    optimizer.step()
    return optimizer.trace.step(step)[earlier:]


def _tokens(step: int, rank: int) -> list[torch.Tensor]:
    """A batch on the rank's device."""
    return [part.to(zerolab.device()) for part in random_tokens(step, rank)]


def _payload(events: list[Event]) -> dict[str, int]:
    """The payload bytes by collective."""
    found: dict[str, int] = {}
    for event in events:
        if event.logical_bytes and event.phase != CONTROL:
            found[event.op] = found.get(event.op, 0) + event.logical_bytes
    return found


class OneProcess:
    """The same training in one process, in plain PyTorch.

    Attributes, of the last step:
        gradients: of each rank, as one tensor each.
        before, after: all parameters, as one tensor.
    """

    gradients: list[torch.Tensor]
    before: torch.Tensor
    after: torch.Tensor

    def __init__(self, model: nn.Module):
        self.model = copy.deepcopy(model)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, **SGD)

    def train(self, step: int) -> None:
        """Take one step with the mean of the ranks' gradients, which are added in rank order."""
        self.before = _flat(self.model)
        self.gradients = [self._gradients(step, rank) for rank in range(dist.get_world_size())]
        mean = sum_of(self.gradients) / len(self.gradients)
        parts = mean.split([parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self.optimizer.step()
        self.after = _flat(self.model)

    def _gradients(self, step: int, rank: int) -> torch.Tensor:
        loss = self.model(*_tokens(step, rank))
        return torch.cat([each.flatten() for each in torch.autograd.grad(loss, self.parameters)])

    def mistakes_in(self, got: torch.Tensor, owners: torch.Tensor, units: torch.Tensor) -> list[str]:
        """The mistakes that lead to these parameters in the first step. Some of the units may be right."""
        close = lambda values, part: torch.allclose(got[part], values[part], rtol=1e-5, atol=1e-6)
        parts = [units == unit for unit in units.unique()]
        wrong = [part for part in parts if not close(self.after, part)]
        mistakes = self._mistakes(owners == dist.get_rank()).items()
        return [why for why, values in mistakes if wrong and all(close(values, part) for part in wrong)]

    def _mistakes(self, mine: torch.Tensor) -> dict[str, torch.Tensor]:
        """By sentence, the parameters that a mistake leads to."""
        before, right, ranks = self.before, self.after, len(self.gradients)
        updated = lambda gradient: before - SGD["lr"] * gradient
        own = updated(self.gradients[dist.get_rank()] / ranks)
        total = sum_of(self.gradients)
        return {
            "the parameters are those from before the step: either update does not call step(unit) for every "
            "unit, or whole parameters are not made from the new shards": before,
            "the gradients were not reduced: each rank updates with its own": own,
            "the gradients were added up and not divided": updated(total),
            "the gradients were divided by the number of ranks twice: the engine divides, not the stage":
                updated(total / ranks**2),
            "each rank has the new values of its own part alone: after step(unit) the parts have to be "
            "gathered, with self.comm.all_gather(unit.flat, unit), and not before it":
                torch.where(mine, right, before),
            "each rank's own part is right, and the rest was updated with its own gradients: a "
            "reduce-scatter leaves the result in the own part only": torch.where(mine, right, own),
            "each rank has what the others updated, and its own part is old":
                torch.where(mine, before, right),
        }  # fmt: skip


def _anywhere(wrong: bool) -> bool:
    """Whether that is so on any rank."""
    told = torch.tensor([float(wrong)])
    dist.all_reduce(told)
    return bool(told)


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _places(optimizer: ZeroOptimizer, model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """For each element the rank that owns it, where each owns an equal part of every unit; and its unit."""
    owners: dict[str, torch.Tensor] = {}
    units: dict[str, torch.Tensor] = {}
    for unit in optimizer.units:
        owner = torch.arange(unit.padded_numel, device=unit.device) // unit.shard_numel
        owners |= {span.name: span.view(owner).flatten() for span in unit.spans}
        of_unit = torch.full_like(owner, unit.index)
        units |= {span.name: span.view(of_unit).flatten() for span in unit.spans}
    names = [name for name, _ in model.named_parameters()]
    return torch.cat([owners[name] for name in names]), torch.cat([units[name] for name in names])


def _elsewhere(optimizer: ZeroOptimizer, number: int) -> tuple[str, range, range] | None:
    """The first unit of which this rank owns another range than all, or from stage 1 on its own part."""
    for unit in optimizer.units:
        every = range(unit.padded_numel)
        owned = every[unit.owned]
        part = every[optimizer.stage.comm.shard_range(unit.padded_numel)] if number else every
        if owned != part:
            return unit.name, owned, part
    return None


def _copies(optimizer: ZeroOptimizer, alive: Alive, alone: OneProcess) -> tuple[int, str | None]:
    """What is in memory beside the buffers of the units and the optimizer, and the name that keeps it."""
    known: list[Any] = [*optimizer.model.parameters(), *alone.parameters]
    for unit in optimizer.units:
        known += [unit.flat, unit.shard, unit.master, unit.grads.local, unit.grads.reduced]
    for state in [*optimizer.state.values(), *alone.optimizer.state.values()]:
        known += state.values()
    smallest = min(unit.shard_numel for unit in optimizer.units) * 4
    with as_plain_tensors():
        found = alive.storages(known, at_least=smallest)
        names = {key: _name(tensor, optimizer) for key, tensor in found.items()}
        kept = {key: tensor for key, tensor in found.items() if names[key]}
        return nbytes(kept), first_name(names.values())


def _name(tensor: torch.Tensor, optimizer: ZeroOptimizer) -> str | None:
    """The name under which the stage, its classes or a unit keeps a tensor. A placeholder has no memory."""
    if isinstance(tensor, ReducedGradient):
        return None
    stage = optimizer.stage
    own = {f"self.{name}": value for name, value in vars(stage).items() if name != "comm"}
    own |= {each.__name__: each for each in type(stage).__mro__[1:] if each not in Stage.__mro__}
    roots = [own, *({"unit": unit} for unit in optimizer.units)]
    return first_name(kept_by(tensor, **each) for each in roots)
