"""Ticket 11: the ledger shows more bytes than the model has, and the loss stays high."""

import torch
import torch.distributed as dist

from zerolab import ring
from zerolab.course.attempts import Attempt
from zerolab.course.lessons.incident_room.check import Ticket
from zerolab.course.lessons.incident_room.costs import costs_too_much
from zerolab.course.lessons.incident_room.engine import MOMENTUM
from zerolab.course.lessons.incident_room.lockstep import trained
from zerolab.course.lessons.incident_room.room import PSI, Case


class Engine11:
    def __init__(self, parameters, lr):
        self.parameters, self.lr = parameters, lr  # by name; "head" is "embedding"
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.cut()

    def cut(self):
        self.flat = torch.cat(list(self.parameters.values()))
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        self.spans = dict(zip(self.parameters, self.flat.split(sizes), strict=True))
        mine = ring.chunks(self.flat.numel(), self.world_size)[self.rank]
        self.shard = self.flat[mine]
        self.optimizer = torch.optim.SGD([self.shard], self.lr, MOMENTUM)

    def reduce(self, gradients):
        gradient = torch.cat([gradients[name] for name in self.spans])
        self.shard.grad = ring.reduce_scatter(gradient) / self.world_size

    def update(self):
        self.optimizer.step()

    def gather(self):
        ring.all_gather(self.flat)
        for name, span in self.spans.items():
            self.parameters[name].copy_(span)

    def step(self, batches):
        (batch,) = batches
        self.reduce(dict(batch.gradients(self.parameters)))  # one for each name
        self.update()
        self.gather()


class Repaired(Engine11):
    def cut(self):
        self.tied = self.parameters
        first = {id(parameter): name for name, parameter in reversed(self.parameters.items())}
        self.parameters = {name: self.tied[name] for name in self.tied if name in first.values()}
        super().cut()

    def reduce(self, gradients):
        gradients["embedding"] += gradients.pop("head")  # one parameter, used twice
        super().reduce(gradients)

    def step(self, batches):
        (batch,) = batches
        self.reduce(dict(batch.gradients(self.tied)))
        self.update()
        self.gather()


def _cost(case, ended) -> str | None:
    found = costs_too_much(case, ended)
    if found and sum(each.state for each in ended) > PSI + case.ranks:
        return f"{found}. The tied weight still stands in flat twice: keep it once, and add its two gradients"
    return found


def _stopped(case: Case, outcome: Attempt) -> str | None:
    """Whether the model was run without one of its parameters."""
    if "size mismatch" not in str(outcome.failure):
        return None
    return (
        "batch.gradients runs the model, which needs every name: give it the parameters with 'head', and add "
        f"the two gradients of the tied weight afterwards ({outcome.failure})"
    )


# A sentence, and where the ranks end.
# fmt: off
MISTAKES = {
    "the tied weight learns from its use in the head alone: the gradients of both uses have to be added":
        lambda case: trained(case, uses=(0, 1)),
    "the tied weight learns from its use in the embedding alone: the gradients of both uses have to "
    "be added":
        lambda case: trained(case, uses=(1, 0)),
    "the two gradients of the tied weight are averaged: it is one parameter used twice, so they add up":
        lambda case: trained(case, uses=(0.5, 0.5)),
    "the gradients of the tied weight count twice":
        lambda case: trained(case, uses=(2, 2)),
}
# fmt: on
TICKET = Ticket(
    Engine11,
    "Engines that go through parameters by name, or module by module, meet a tied weight twice. With FSDP "
    "tied weights came apart in NVIDIA-NeMo/RL#227, and had to be tied again after initialisation in "
    "huggingface/accelerate#3154. Today FSDP2 refuses to shard one parameter in two groups "
    "(pytorch/pytorch#176257). zerolab counts a tied parameter once.",
    (
        "how many elements has flat, and how many have the parameters? Count a tied weight once.",
        "two names are one tensor: self.parameters['head'] is self.parameters['embedding']. What does the "
        "last copy_ in gather overwrite?",
        "build flat without 'head', and add the gradient of 'head' to that of 'embedding' in reduce.",
    ),
    cases=tuple(Case(ranks, by_name=True, tied=True) for ranks in (3, 2, 4)),
    mistakes=MISTAKES,
    cost=_cost,
    stopped=_stopped,
)
check_11 = TICKET.check(11, [Repaired])
