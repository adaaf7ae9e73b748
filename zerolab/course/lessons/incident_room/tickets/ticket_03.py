"""Ticket 3: every rank logs a different gradient norm."""

import math

import torch
import torch.distributed as dist

from zerolab import ring
from zerolab.course.lessons.incident_room.check import Ticket
from zerolab.course.lessons.incident_room.costs import costs_too_much
from zerolab.course.lessons.incident_room.engine import MOMENTUM
from zerolab.course.lessons.incident_room.lockstep import (
    Gradients,
    Lockstep,
    chunk,
    mean,
    own,
    summed,
    times,
    trained,
)
from zerolab.course.lessons.incident_room.room import Case, batches, start

MAX_NORM = 1.0


class Engine3:
    def __init__(self, flat, lr):
        self.flat, self.lr = flat, lr
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.total = 0
        self.cut()

    def cut(self):
        mine = ring.chunks(self.flat.numel(), self.world_size)[self.rank]
        self.shard = self.flat[mine]
        self.optimizer = torch.optim.SGD([self.shard], self.lr, MOMENTUM)

    def reduce(self, gradient):
        self.total = self.total + ring.reduce_scatter(gradient)

    def clip(self, max_norm=1.0):
        norm = self.shard.grad.norm()
        self.shard.grad *= (max_norm / norm).clamp(max=1)
        self.log = norm.item()  # what the dashboard shows

    def update(self, micro_batches):
        self.shard.grad = self.total / (self.world_size * micro_batches)
        self.clip()
        self.optimizer.step()
        self.total = 0

    def gather(self):
        ring.all_gather(self.flat)

    def step(self, batches):
        for batch in batches:
            self.reduce(batch.gradient(self.flat))
        self.update(len(batches))
        self.gather()


class Repaired(Engine3):
    def clip(self, max_norm=1.0):
        squares = self.shard.grad.square().sum()
        dist.all_reduce(squares)  # one number: the squares add up, the norms do not
        norm = squares.sqrt()
        self.shard.grad *= (max_norm / norm).clamp(max=1)
        self.log = norm.item()


def clipped(gradients: Gradients, norm) -> torch.Tensor:
    """The mean gradient, scaled by the norm that `norm` makes of the shards' norms."""
    gradient = mean(gradients)
    norms = torch.stack([gradient[chunk(r, len(gradients))].norm() for r in range(len(gradients))])
    return gradient * (MAX_NORM / norm(norms)).clamp(max=1)


def clipped_by(norm):
    return lambda case: trained(case, lambda gradients, owner: clipped(gradients, norm))


def _to_length_1(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * (MAX_NORM / gradient.norm())


def _upside_down(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * (gradient.norm() / MAX_NORM).clamp(min=1)


def _by_norm(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * (gradient.norm() / MAX_NORM).clamp(max=1)


def by_parameters(case: Case) -> list[torch.Tensor]:
    """Where the ranks end if the parameters' norm decides how much the gradient is scaled."""
    world = Lockstep(case.ranks)
    data = [batches(case, rank) for rank in range(case.ranks)]
    for _ in range(case.steps):
        factor = (MAX_NORM / world.flats[0].norm()).clamp(max=1)
        world.step(data, times(factor))
    return world.flats


def _by_shard(gradients: Gradients, owner: int) -> torch.Tensor:
    return clipped(gradients, lambda norms: norms[owner])


def _by_own(gradients: Gradients, owner: int) -> torch.Tensor:
    return mean(gradients) * (MAX_NORM / own(gradients, owner).norm()).clamp(max=1)


def _sum_clipped(gradients: Gradients, owner: int) -> torch.Tensor:
    total = summed(gradients)
    return total * (MAX_NORM / total.norm()).clamp(max=1) / sum(map(len, gradients))


def _cost(case, ended) -> str | None:
    found = costs_too_much(case, ended)
    if found and "moves" in found:
        return f"{found}. The norm needs one number of each rank, not its gradient"
    return found or _logs_differ(ended) or _log_is_wrong(case, ended)


def _logs_differ(ended) -> str | None:
    """Whether the ranks log different norms. A rank need not log at all."""
    logs = {rank: log for rank, each in enumerate(ended) if (log := _number(each.logs[0])) is not None}
    if not logs or math.isclose(min(logs.values()), max(logs.values()), rel_tol=1e-6):
        return None
    listed = ", ".join(f"{log:.4g} on rank {rank}" for rank, log in logs.items())
    alone = (
        ". Here they exchange no number: all ranks have to take part in the all-reduce, whatever their own "
        "norm is"
    )
    exchanged = any(call for call, sent in ended[0].calls.items() if sent < 0.5)
    return (
        f"the ranks clip rightly, but self.log still differs from rank to rank: {listed}. That is what the "
        f"ticket reports: log the norm of the whole gradient{alone * (not exchanged)}"
    )


def _log_is_wrong(case: Case, ended) -> str | None:
    """Whether the ranks log another number than the norm of the mean gradient before it is clipped."""
    gradients = [[batch.gradient(start()) for batch in batches(case, rank)] for rank in range(case.ranks)]
    log, right = _number(ended[0].logs[0]), float(mean(gradients).norm())
    if log is None or math.isclose(log, right, rel_tol=1e-4):
        return None
    clipped = math.isclose(log, min(right, MAX_NORM), rel_tol=1e-4)
    return (
        f"the ranks clip rightly, and self.log is {log:.4g} in the first step, "
        f"{'the norm after' if clipped else 'which is not the norm before'} the clipping: log that of the "
        f"mean gradient before it is scaled, {right:.4g}"
    )


def _number(log) -> float | None:
    """What a rank has logged, if it is one number."""
    one = isinstance(log, torch.Tensor) and log.numel() == 1
    return float(log) if one or isinstance(log, int | float) else None


# A sentence, and where the ranks end.
# fmt: off
MISTAKES = {
    "each rank still clips by the norm of its own shard":
        lambda case: trained(case, _by_shard),
    "that adds the ranks' norms. Norms do not add, their squares do: sum the squares, then take the "
    "root":
        clipped_by(torch.sum),
    "that takes the largest norm of a shard, and the whole gradient's is larger":
        clipped_by(torch.max),
    "that takes the mean of the shards' norms, and the whole gradient's norm is larger":
        clipped_by(torch.mean),
    "the root of the sum of the squares is missing":
        clipped_by(lambda norms: norms.square().sum()),
    "that is the root of the mean of the squares: add the squares up, and do not divide":
        clipped_by(lambda norms: norms.square().mean().sqrt()),
    "each rank clips by the norm of its own gradient, before it is averaged":
        lambda case: trained(case, _by_own),
    "the sum is clipped before it is divided by N·M, or max_norm is divided by that: the mean that is left "
    "is too short. Divide the gradient first, then clip the mean to max_norm":
        lambda case: trained(case, _sum_clipped),
    "each element is clamped by itself, which changes the direction: scale the gradient by one factor":
        lambda case: trained(case, lambda gradients, owner: mean(gradients).clamp(-MAX_NORM, MAX_NORM)),
    "nothing is clipped before optimizer.step uses the gradient: clip first":
        trained,
    "the factor is upside down: it is max_norm / norm":
        lambda case: trained(case, lambda gradients, owner: _upside_down(mean(gradients))),
    "the factor is upside down: it is max_norm / norm, and 1 at most":
        lambda case: trained(case, lambda gradients, owner: _by_norm(mean(gradients))),
    "that takes the norm of the parameters: clip by the norm of the gradient":
        by_parameters,
    "a gradient that is shorter than max_norm is made longer: clipping never lengthens, so clamp at 1":
        lambda case: trained(case, lambda gradients, owner: _to_length_1(mean(gradients))),
}
# fmt: on
TICKET = Ticket(
    Engine3,
    "Many engines clipped by the norm of what a rank holds. It is why FSDP got a clip_grad_norm_ of its own "
    "(pytorch/pytorch#72548). A user of torchtitan found it as you did, by a norm that differs from rank to "
    "rank (pytorch/torchtitan#766).",
    (
        "the gradient is one vector, and each rank has a part of it. Which norm does max_norm speak of?",
        "the norm of a vector is the root of the sum of its squares. Which number of each rank can be added?",
        "sum the squares of the shard, all-reduce that one number, then take the root.",
    ),
    cases=(Case(3), Case(2), Case(4), Case(3, small=True), Case(2, micro_batches=2)),
    right=clipped_by(lambda norms: norms.square().sum().sqrt()),
    also_right=clipped_by(lambda norms: norms.square().sum().sqrt() + 1e-6),  # as torch and zerolab clip
    mistakes=MISTAKES,
    cost=_cost,
    max_norm=MAX_NORM,
)
check_3 = TICKET.check(3, [Repaired])
