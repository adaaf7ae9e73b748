"""Ticket 8: after a restart the loss falls more slowly on four ranks, and on two it does not."""

import torch
import torch.distributed as dist

from zerolab import ring
from zerolab.course.lessons.incident_room.check import Ticket
from zerolab.course.lessons.incident_room.engine import MOMENTUM
from zerolab.course.lessons.incident_room.resumes import resumed
from zerolab.course.lessons.incident_room.room import PSI, Case

UNITS = (42, 61)  # elements of the two units that flat consists of


class Engine8:
    def __init__(self, flat, lr):
        self.units = flat.split(UNITS)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.padded = [self.pad(unit) for unit in self.units]
        self.shards = [self.own(padded) for padded in self.padded]
        self.optimizer = torch.optim.SGD(self.shards, lr, MOMENTUM)

    def pad(self, unit):
        return torch.cat([unit, unit.new_zeros(-len(unit) % self.world_size)])

    def own(self, padded):
        return padded.view(self.world_size, -1)[self.rank]

    def step(self, batches):
        (batch,) = batches
        gradient = batch.gradient(torch.cat(self.units))
        for shard, part in zip(self.shards, gradient.split(UNITS), strict=True):
            shard.grad = ring.reduce_scatter(self.pad(part)) / self.world_size
        self.optimizer.step()
        for unit, padded in zip(self.units, self.padded, strict=True):
            ring.all_gather(padded)
            unit.copy_(padded[: len(unit)])

    def momentum(self, place):
        whole = torch.zeros_like(self.padded[place])
        self.own(whole).copy_(self.optimizer.state[self.shards[place]]["momentum_buffer"])
        ring.all_gather(whole)
        return whole

    def save(self):
        world = torch.cat([self.momentum(place)[: len(unit)] for place, unit in enumerate(self.units)])
        second = len(self.padded[0])  # where the second unit begins
        return [world[:second], world[second:]]

    def load(self, files):
        for shard, padded, saved in zip(self.shards, self.padded, files[self.rank], strict=True):
            whole = torch.zeros_like(padded)
            whole[: len(saved)] = saved[: len(whole)]
            self.optimizer.state[shard]["momentum_buffer"] = self.own(whole).clone()


class Repaired(Engine8):
    def save(self):
        return [self.momentum(place)[: len(unit)] for place, unit in enumerate(self.units)]  # no padding


def shifted(case: Case, by: int) -> list[torch.Tensor]:
    """Where the ranks end if the second unit's momentum is read so many elements too late."""
    first = UNITS[0]

    def shift(momentum: torch.Tensor) -> torch.Tensor:
        made = momentum.clone()
        made[first:] = 0
        made[first : PSI - by] = momentum[first + by :]
        return made

    return resumed(case, shift)


def owned(ranks: int, rank: int) -> list[torch.Tensor]:
    """Which elements of all each of a rank's shards has, and -1 for padding."""
    padded = [
        torch.cat([unit, unit.new_full((-len(unit) % ranks,), -1)]) for unit in torch.arange(PSI).split(UNITS)
    ]
    return [unit.view(ranks, -1)[rank] for unit in padded]


# A sentence, and where the ranks end.
# fmt: off
MISTAKES = {
    "the second unit's momentum is read too late, by as many elements as the first unit has padding":
        lambda case: shifted(case, -UNITS[0] % case.ranks),
    "the second unit's momentum is forgotten":
        lambda case: shifted(case, PSI - UNITS[0]),
    "the momentum is forgotten, so the first steps after the resume are too short. Write it to "
    'self.optimizer.state[shard]["momentum_buffer"], for each of self.shards':
        lambda case: resumed(case, torch.zeros_like),
}
# fmt: on
TICKET = Ticket(
    Engine8,
    "In Megatron-LM a checkpoint that may be loaded at another N stripped the padding of each bucket, and "
    "read with offsets that still counted it. Everything after the first bucket came from the wrong place, "
    "and its end was filled with zeros. With a single bucket nobody could see it (NVIDIA/Megatron-LM#5077).",
    (
        "42 is a multiple of 2 and of 3, and 61 is not. On how many ranks is the first unit padded?",
        "world has no padding. Where does the second unit begin in it, and where does save begin to read?",
        "each whole[: len(unit)] is a unit's momentum already: return the list of them.",
    ),
    cases=(Case(4, resumed_on=4), Case(2, resumed_on=2), Case(3, resumed_on=3)),
    right=resumed,
    mistakes=MISTAKES,
    owned=owned,
)
check_8 = TICKET.check(8, [Repaired])
