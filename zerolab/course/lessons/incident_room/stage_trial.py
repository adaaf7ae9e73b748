"""Lesson 09: what a rank sees of a stage that the reader wrote. All of this runs in the worker processes."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import zerolab
from zerolab.collectives import Work
from zerolab.course.alive import Alive, kept_by, nbytes
from zerolab.events import CONTROL
from zerolab.measure import MeasuredStates
from zerolab.memory import ModelStates
from zerolab.optimizer import STAGES, ZeroOptimizer
from zerolab.parity.parity import random_tokens, small_gpt
from zerolab.parity.prediction import predict
from zerolab.rehearsal import Rehearsal
from zerolab.stages.base import Stage
from zerolab.unit import FlatUnit
from zerolab.unit.sharded import as_plain_tensors

VERBS = ("setup", "unshard", "reshard", "reduce_grads", "after_reduce", "update")
COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce")
SGD: dict[str, Any] = {"lr": 0.5, "momentum": 0.9}
STEPS = 2
OWN_STAGES = dict(STAGES)
TRILLION_RANKS = 1024


class Misused(RuntimeError):
    """A method of a stage does not do what the engine relies on."""


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
        copies: the bytes that the stage keeps beside its units' buffers, and where.
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


def install(stage_class: type[Stage], number: int) -> list[tuple[str, Work]]:
    """Let ZeroOptimizer build this class as its stage `number`; what it returns, and sends, is looked at.

    Returns: the collectives that it will start.
    """
    started: list[tuple[str, Work]] = []

    class Watched(stage_class):  # type: ignore[misc, valid-type]
        def __init__(self, comm):
            super().__init__(comm)
            for name in COLLECTIVES:
                setattr(comm, name, _noting(name, getattr(comm, name), started))

        def unshard(self, unit):
            return _work(super().unshard(unit), "unshard").then(partial(_see_whole, unit))

        def reduce_grads(self, unit):
            return _work(super().reduce_grads(unit), "reduce_grads")

        def after_reduce(self, unit):
            super().after_reduce(unit)
            _see_kept(unit)

    for other, own in OWN_STAGES.items():
        for verb in VERBS:
            setattr(own, verb, _refusal(other))
    STAGES[number] = Watched
    return started


def _noting(name: str, collective: Callable, started: list) -> Callable:
    def noted(*args, **kwargs):
        work = collective(*args, **kwargs)
        started.append((name, work))
        return work

    return noted


def _work(returned: Any, verb: str) -> Work:
    if not isinstance(returned, Work):
        raise Misused(
            f"{verb} returned {type(returned).__name__}, and the engine waits for the Work that it returns: "
            "return the one of the collective, or an empty Work()"
        )
    return returned


def _see_whole(unit: FlatUnit) -> None:
    if not unit.whole:
        raise Misused(
            f"unit {unit.name} is not whole when the Work of unshard ends: chain unit.restore_parameters to "
            "it, with then"
        )


def _see_kept(unit: FlatUnit) -> None:
    kept, owned = unit.grads.reduced, unit.owned.stop - unit.owned.start
    if kept is None or len(kept) != owned:
        what = "nothing" if kept is None else f"{len(kept)} elements"
        raise Misused(
            f"after_reduce kept {what} of unit {unit.name}, whose owned range has {owned} elements: hand "
            "unit.grads.keep the gradients of unit.owned"
        )


def _refusal(number: int) -> Callable:
    def refuse(*_):
        raise Misused(f"this uses zerolab's own Stage{number}, which is what you write here")

    return refuse


def trials(stages: Mapping[int, type[Stage]]) -> dict[int, Seen]:
    """One stage after the other, by number."""
    return {number: trial(stage_class, number) for number, stage_class in stages.items()}


def trial(stage_class: type[Stage], number: int) -> Seen:
    """Train two steps with the stage, and in one process; stop after a step with wrong values."""
    started = install(stage_class, number)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = small_gpt()
    plain = copy.deepcopy(model)
    stock = torch.optim.SGD(plain.parameters(), **SGD)
    with as_plain_tensors():  # the last trial's parameters may be here still
        alive = Alive()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=number, **SGD)
    fits: list[str] = []
    for step in range(STEPS):
        earlier = len(optimizer.trace.step(step))  # the gathers of full_params
        optimizer.zero_grad()
        model(*random_tokens(step, rank)).backward()
        optimizer.step()
        held, events = optimizer.memory(), optimizer.trace.step(step)[earlier:]
        copies = _copies(optimizer, alive, plain, stock)
        before, gradients = _flat(plain), [_gradients(plain, step, each) for each in range(ranks)]
        _step(plain, stock, sum(gradients) / ranks)
        with optimizer.full_params():
            got, want = _flat(model), _flat(plain)
        if _anywhere(not torch.equal(got, want)):
            fits = [] if step else _fits(got, before, want, gradients, *_places(optimizer, model))
            break
    predicted = predict(optimizer, number)
    waiting = [name for name, work in started if work.waits]
    passes: dict[str, float] = {}
    for event in events:
        if event.logical_bytes and event.phase != CONTROL:
            passes[event.op] = passes.get(event.op, 0) + event.logical_bytes / (4 * want.numel())
    return Seen(
        step + 1,
        torch.equal(got, want),
        (got - want).abs().nan_to_num(nan=float("inf")).max().item(),
        fits,
        held,
        predicted.memory,
        predicted.traffic.logical_bytes / (4 * want.numel()),
        passes,
        waiting,
        copies,
    )


def _anywhere(wrong: bool) -> bool:
    """Whether that is so on any rank."""
    told = torch.tensor([float(wrong)])
    dist.all_reduce(told)
    return bool(told)


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _gradients(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """One rank's gradients, without sharding."""
    loss = model(*random_tokens(step, rank))
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, mean: torch.Tensor | float) -> None:
    assert isinstance(mean, torch.Tensor)
    parameters = list(model.parameters())
    for parameter, part in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    optimizer.step()


def _places(optimizer: ZeroOptimizer, model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """For each element the rank that owns it, where each owns an equal part of every unit; and its unit."""
    owners: dict[str, torch.Tensor] = {}
    units: dict[str, torch.Tensor] = {}
    for unit in optimizer.units:
        owner = torch.arange(unit.padded_numel) // unit.shard_numel
        owners |= {span.name: span.view(owner).flatten() for span in unit.spans}
        units |= {span.name: torch.full((span.numel,), unit.index) for span in unit.spans}
    names = [name for name, _ in model.named_parameters()]
    return torch.cat([owners[name] for name in names]), torch.cat([units[name] for name in names])


def _fits(
    got: torch.Tensor,
    before: torch.Tensor,
    right: torch.Tensor,
    gradients: list[torch.Tensor],
    owners: torch.Tensor,
    units: torch.Tensor,
) -> list[str]:
    """The mistakes that lead to these parameters in the first step. Some of the units may be right."""
    rank, ranks = dist.get_rank(), len(gradients)
    after = lambda gradient: before - SGD["lr"] * gradient
    total = torch.stack(gradients).sum(dim=0)
    own, mine = after(gradients[rank] / ranks), owners == rank
    mistakes = {
        "the parameters are those from before the step: either update does not call step(unit) for every "
        "unit, or whole parameters are not made from the new shards": before,
        "the gradients were not reduced: each rank updates with its own": own,
        "the gradients were added up and not divided": after(total),
        "the gradients were divided by the number of ranks twice: the engine divides, not the stage": after(
            total / ranks**2
        ),
        "each rank has the new values of its own part alone: after step(unit) the parts have to be gathered, "
        "with self.comm.all_gather(unit.flat, unit), and not before it": torch.where(mine, right, before),
        "each rank's own part is right, and the rest was updated with its own gradients: a reduce-scatter "
        "leaves the result in the own part only": torch.where(mine, right, own),
        "each rank has what the others updated, and its own part is old": torch.where(mine, before, right),
    }
    close = lambda values, part: torch.allclose(got[part], values[part], rtol=1e-5, atol=1e-6)
    parts = [units == unit for unit in units.unique()]
    wrong = [part for part in parts if not close(right, part)]
    return [why for why, values in mistakes.items() if wrong and all(close(values, part) for part in wrong)]


def _copies(optimizer: ZeroOptimizer, alive: Alive, plain: nn.Module, stock: Any) -> tuple[int, str | None]:
    """What is in memory beside the buffers of the units and the optimizer, and the name that keeps it."""
    known: list[Any] = [*optimizer.model.parameters(), *plain.parameters()]
    for unit in optimizer.units:
        known += [unit.flat, unit.shard, unit.master, unit.grads.local, unit.grads.reduced]
    for state in [*optimizer.state.values(), *stock.state.values()]:
        known += state.values()
    smallest = min(unit.shard_numel for unit in optimizer.units) * 4
    own = {f"self.{name}": value for name, value in vars(optimizer.stage).items() if name != "comm"}
    own |= {each.__name__: each for each in type(optimizer.stage).__mro__[1:] if each not in Stage.__mro__}
    with as_plain_tensors():
        found = alive.storages(known, at_least=smallest)
        names = {key: kept_by(tensor, **own) for key, tensor in found.items()}
        kept = {key: tensor for key, tensor in found.items() if names[key]}
        return nbytes(kept), next(filter(None, names.values()), None)


def trillion() -> nn.Module:
    """A GPT of 1.001 · 10¹² parameters in a few large blocks, which a rehearsal goes through quickly."""
    return zerolab.models.GPT(vocab=50_257, width=143_360, depth=4, heads=8, context=1024)


def rehearsals(stages: Mapping[int, type[Stage]]) -> dict[int, Rehearsal | str]:
    """By stage, a step of a trillion parameters on 1,024 ranks, or the error that it ended with."""
    dist.destroy_process_group()  # a rehearsal makes its own
    found: dict[int, Rehearsal | str] = {}
    with _disable_current_modes():
        for number, stage_class in stages.items():
            install(stage_class, number)
            try:
                found[number] = zerolab.rehearse(trillion, TRILLION_RANKS, number)
            except Exception as error:
                found[number] = f"{type(error).__name__}: {error}"
    return found
