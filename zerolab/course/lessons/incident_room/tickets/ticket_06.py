"""Ticket 6: the job dies in its first step, in the middle of a reduce."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from zerolab import ring
from zerolab.course.attempts import Attempt
from zerolab.course.hash_seed import SEEDS, may_depend, under_each_seed
from zerolab.course.lessons.incident_room.check import Ticket
from zerolab.course.lessons.incident_room.engine import MOMENTUM
from zerolab.course.lessons.incident_room.lockstep import Gradients, sum_of, trained
from zerolab.course.lessons.incident_room.room import NAMES, Case
from zerolab.course.messages import Message

Calls = Sequence[Sequence[Message]]
ORDERS = Path(__file__).parents[1] / "orders.py"


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


def of_owners(by_owner: list[torch.Tensor]) -> torch.Tensor:
    """From a whole gradient of each rank: of each parameter the owner's shard."""
    made, begin = torch.empty_like(by_owner[0]), 0
    for size in NAMES.values():
        for whole, cut in zip(by_owner, ring.chunks(size, len(by_owner)), strict=True):
            place = slice(begin + cut.start, begin + cut.stop)
            made[place] = whole[place]
        begin += size
    return made


def mixed_and_split(case: Case) -> list[torch.Tensor]:
    """The same, if each rank also takes the sum apart in its own order, and keeps its shard of each piece."""
    first = NAMES["body"]

    def combine(gradients: Gradients, owner: int) -> torch.Tensor:
        ends = [own[0] if rank % 2 == 0 else own[0].roll(-first) for rank, own in enumerate(gradients)]
        total = sum_of(ends) / case.ranks
        return of_owners([total.roll(first) if rank % 2 else total for rank in range(case.ranks)])

    return trained(case, combine)


def own_alone(case: Case, divisor: int) -> list[torch.Tensor]:
    """Where the ranks end if each updates its shards with its own gradients over `divisor`."""
    return trained(case, lambda gradients, owner: of_owners([own[0] / divisor for own in gradients]))


def orders_that_differ(case: Case, outcome: Attempt) -> str | None:
    """Whether the ranks reduced the parameters in different orders; the sizes of messages tell which."""
    sizes = {cut.stop - cut.start: name for name, n in NAMES.items() for cut in ring.chunks(n, case.ranks)}
    sizes |= {numel: name for name, numel in NAMES.items()}
    sent = [[call for call in own if call.numel in sizes] for own in outcome.messages]
    if not all(sent):
        return None
    reduced = [[call for call in own if "all_gather" not in call.call] for own in sent]
    if told := _none_reduced(sent, reduced, sizes):
        return told
    first = [sizes[own[0].numel] for own in sent]
    other = next((rank for rank, name in enumerate(first) if name != first[0]), None)
    if other is None:
        return None
    waited = any(call.op == "barrier" for own in outcome.calls for call in own)
    barrier = ". A barrier makes the ranks wait for each other, and changes no order" if waited else ""
    place = f" ({sent[other][0].place})" if sent[other][0].place else ""
    return (
        f"rank 0 reduces {first[0]} first, and rank {other} {first[other]}: the ranks' first "
        "reductions are added to each other, although they are of different parameters. The gradients get "
        "ready, and come out of a dict, in an order that differs from rank to rank: reduce in one that all "
        f"ranks share, such as that of self.parameters{barrier}{place}"
    )


def _none_reduced(sent: Calls, reduced: Calls, sizes: Mapping[int, str]) -> str | None:
    """Whether a rank leaves a reduction out in which others take part."""
    names = [list(dict.fromkeys(sizes[call.numel] for call in own)) for own in reduced]
    some = next((rank for rank, own in enumerate(names) if own), None)
    fewer = next((rank for rank, own in enumerate(names) if not own), None)
    if some is None or fewer is None:
        return None
    return (
        f"rank {some} reduces {names[some][0]} first, and rank {fewer} reduces nothing: it is in "
        f"{sent[fewer][0].call} already. Every rank takes part in the reduction of every parameter, so leave "
        "none out"
    )


def orders_by_hash(engine: type) -> str | None:
    """Whether the order of the reductions depends on the hash of a text, which differs by process."""
    if not may_depend(engine):
        return None
    said = [each.split() for each in under_each_seed(ORDERS, engine)]
    if len(said) < 2 or said[0] == said[1]:
        return None
    first = [each[0] if each else "nothing" for each in said]
    return (
        f"the order of the reductions comes from a set or from hash(): where PYTHONHASHSEED is {SEEDS[0]}, "
        f"{first[0]} is reduced first, and where it is {SEEDS[1]}, {first[1]}. Here all ranks are forked "
        "from one process and have its seed, and under torchrun each has its own. Reduce in an order that "
        "does not depend on it, such as that of self.parameters"
    )


# A sentence, and where the ranks end.
# fmt: off
MISTAKES = {
    "each rank updates its shards with its own gradients alone, and divides them by the number of ranks: sum "
    "them over the ranks first, with ring.reduce_scatter":
        lambda case: own_alone(case, case.ranks),
    "each rank updates its shards with its own gradients alone: sum them over the ranks first, with "
    "ring.reduce_scatter, and divide the sum":
        lambda case: own_alone(case, 1),
    "numbers of one parameter are added to those of another: each rank puts its gradients together in "
    "an "
    "order of its own":
        mixed,
    "numbers of one parameter are added to those of another: each rank puts its gradients end to end in the "
    "order in which they get ready, which differs from rank to rank, and takes the sum apart in it":
        mixed_and_split,
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
    last=orders_by_hash,
    cases=(*(Case(ranks, by_name=True) for ranks in (3, 2, 4)), Case(4, by_name=True, thirds=True)),
)
check_6 = TICKET.check(6, [Repaired])
