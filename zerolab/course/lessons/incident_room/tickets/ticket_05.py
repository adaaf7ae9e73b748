"""Ticket 5: the training loss is perfect, and the evaluation is not."""

import torch
import torch.distributed as dist

from zerolab import ring
from zerolab.course.lessons.incident_room.check import Ticket
from zerolab.course.lessons.incident_room.costs import costs_too_much
from zerolab.course.lessons.incident_room.engine import MOMENTUM
from zerolab.course.lessons.incident_room.lockstep import lagging


class Engine5:
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

    def update(self, micro_batches):
        self.shard.grad = self.total / (self.world_size * micro_batches)
        self.optimizer.step()
        self.total = 0

    def gather(self):
        ring.all_gather(self.flat)

    def step(self, batches):
        self.gather()  # forward needs all of flat
        for batch in batches:
            self.reduce(batch.gradient(self.flat))
        self.update(len(batches))


class Repaired(Engine5):
    def step(self, batches):
        for batch in batches:
            self.reduce(batch.gradient(self.flat))
        self.update(len(batches))
        self.gather()  # whoever reads flat after a step reads the new parameters


def _cost(case, ended) -> str | None:
    found = costs_too_much(case, ended)
    gathered = sum(sent for call, sent in ended[0].calls.items() if "all_gather" in call)
    if found and "moves" in found and gathered > 1.3:
        return f"{found}. After the update nothing changes flat, so one gather is one too many"
    return found


# A sentence, and where the ranks end.
# fmt: off
MISTAKES = {
    "between steps each rank still has the others' shards of the step before: gather after the update, "
    "not "
    "before the next step":
        lagging,
}
# fmt: on
TICKET = Ticket(
    Engine5,
    "To gather late hides time, and everyone who reads the parameters in between has to know. In "
    "Megatron-LM one optimizer's gather after loading a checkpoint never ran: its list of models was "
    "empty. The run went on from another model than the one it had saved, without an error "
    "(NVIDIA/Megatron-LM#6920).",
    (
        "which parameters does a rank have between two steps? Compare flat on two ranks.",
        "the training loss is computed after the gather. The evaluation is computed before it.",
        "move the gather to the end of step.",
    ),
    mistakes=MISTAKES,
    cost=_cost,
)
check_5 = TICKET.check(5, [Repaired])
