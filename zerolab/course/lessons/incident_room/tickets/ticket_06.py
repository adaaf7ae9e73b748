"""Ticket 6: the job dies in its first step, in the middle of a reduce."""

import torch
import torch.distributed as dist

from zerolab import ring
from zerolab.course.attempts import Attempt
from zerolab.course.lessons.incident_room.check import Ticket, unsharded
from zerolab.course.lessons.incident_room.engine import MOMENTUM
from zerolab.course.lessons.incident_room.lockstep import Gradients, sum_of, trained
from zerolab.course.lessons.incident_room.room import NAMES, Case


class Engine6:
    def __init__(self, parameters, lr):
        self.parameters, self.lr = parameters, lr  # by name
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.cut()

    def cut(self):
        self.shards = {}
        for name, whole in self.parameters.items():
            mine = ring.chunks(whole.numel(), self.world_size)[self.rank]
            self.shards[name] = whole[mine]
        self.optimizer = torch.optim.SGD(self.shards.values(), self.lr, MOMENTUM)

    def reduce(self, name, gradient):
        self.shards[name].grad = ring.reduce_scatter(gradient) / self.world_size

    def update(self):
        self.optimizer.step()

    def gather(self):
        for whole in self.parameters.values():
            ring.all_gather(whole)

    def step(self, batches):
        (batch,) = batches
        for name, gradient in batch.gradients(self.parameters):  # as backward gets them ready
            self.reduce(name, gradient)
        self.update()
        self.gather()


class Repaired(Engine6):
    def step(self, batches):
        (batch,) = batches
        ready = dict(batch.gradients(self.parameters))
        for name in self.parameters:  # the same order on every rank
            self.reduce(name, ready[name])
        self.update()
        self.gather()


def mixed(case: Case) -> list[torch.Tensor]:
    """Where the ranks end if each puts its gradients end to end as they get ready, and they are summed."""
    first = NAMES["body"]

    def combine(gradients: Gradients, owner: int) -> torch.Tensor:
        ends = [own[0] if rank % 2 == 0 else own[0].roll(-first) for rank, own in enumerate(gradients)]
        return sum_of(ends) / case.ranks

    return trained(case, combine)


def orders_that_differ(case: Case, outcome: Attempt) -> str | None:
    """Whether the ranks reduced the parameters in different orders; the sizes of messages tell which."""
    sizes = {cut.stop - cut.start: name for name, n in NAMES.items() for cut in ring.chunks(n, case.ranks)}
    sizes |= {numel: name for name, numel in NAMES.items()}
    sent = [[call for call in own if call.numel in sizes] for own in outcome.messages]
    if not all(sent):
        return None
    first = [sizes[own[0].numel] for own in sent]
    other = next((rank for rank, name in enumerate(first) if name != first[0]), None)
    if other is None:
        return None
    waited = any(call.op == "barrier" for own in outcome.calls for call in own)
    barrier = ". A barrier makes the ranks wait for each other, and changes no order" if waited else ""
    place = f" ({sent[other][0].place})" if sent[other][0].place else ""
    return (
        f"rank 0 reduces {first[0]} first, and rank {other} {first[other]}: the first reduce of one rank "
        "meets the first of the other, whatever it is of. The gradients get ready, and come out of a dict, "
        "in an order that differs from rank to rank: reduce in one that all ranks share, such as that of "
        f"self.parameters{barrier}{place}"
    )


def _cost(case, ended) -> str | None:
    if ended[0].passes[-1] > 2.3:
        return (
            f"the values are right, but a step moves {ended[0].passes[-1]:.1f}Ψ where 2Ψ are enough: one "
            "order for all ranks costs no byte"
        )
    return unsharded(case, ended)


# A sentence, and where the ranks end.
# fmt: off
MISTAKES = {
    "numbers of one parameter are added to those of another: each rank puts its gradients together in "
    "an "
    "order of its own":
        mixed,
}
# fmt: on
TICKET = Ticket(
    Engine6,
    "Collectives have no names: the first call of one rank meets the first call of the other. Under "
    "DistributedDataParallel some ranks ran a module that others did not, so one rank's all-to-all met "
    "another's all-reduce, and the job hung or read nonsense (pytorch/pytorch#72843). zerolab tags its "
    "messages and compares the order of collectives, so such ranks get an error.",
    (
        "what does each rank send first? The report says how many elements.",
        "batch.gradients yields in the order in which backward gets ready. Is that the same on all ranks?",
        "take all gradients first, dict(batch.gradients(...)), then reduce them in the order of "
        "self.parameters, which is the same on every rank.",
    ),
    mistakes=MISTAKES,
    stopped=orders_that_differ,
    cost=_cost,
    cases=tuple(Case(ranks, by_name=True) for ranks in (3, 2, 4)),
)
check_6 = TICKET.check(6, [Repaired])
