"""Ticket 12: with more micro-batches the network is full."""

import torch
import torch.distributed as dist

from zerolab import ring
from zerolab.course.lessons.incident_room.check import Ticket
from zerolab.course.lessons.incident_room.costs import unsharded
from zerolab.course.lessons.incident_room.engine import MOMENTUM
from zerolab.course.lessons.incident_room.held import ITEM
from zerolab.course.lessons.incident_room.lockstep import each_updates_unseen, untouched
from zerolab.course.lessons.incident_room.room import PSI, Case

NO_ROOM = "There is no room to keep a whole gradient from one micro-batch to the next"


class Engine12:
    def __init__(self, flat, lr):
        self.numel, self.lr = flat.numel(), lr
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.total = 0
        self.cut(flat)

    def cut(self, flat):
        self.mine = ring.chunks(self.numel, self.world_size)[self.rank]
        self.shard = flat[self.mine].clone()  # all that a rank keeps of flat
        self.optimizer = torch.optim.SGD([self.shard], self.lr, MOMENTUM)

    def gather(self):
        whole = self.shard.new_empty(self.numel)
        whole[self.mine] = self.shard
        ring.all_gather(whole)
        return whole

    def reduce(self, gradient):
        self.total = self.total + ring.reduce_scatter(gradient)

    def update(self, micro_batches):
        self.shard.grad = self.total / (self.world_size * micro_batches)
        self.optimizer.step()
        self.total = 0

    def step(self, batches):
        for batch in batches:
            self.loss = batch.loss(self.gather())  # forward; then whole is freed
            self.reduce(batch.gradient(self.gather()))  # backward
        self.update(len(batches))


class Repaired(Engine12):
    def step(self, batches):
        whole = self.gather()  # no update comes before the last micro-batch
        for batch in batches:
            self.loss = batch.loss(whole)
            self.reduce(batch.gradient(whole))
        self.update(len(batches))


def sent_for(case, ended) -> str | None:
    """What the bytes say: which gathers are too many, or whether whole gradients were accumulated."""
    moved, many = ended[0].passes[-1], case.micro_batches
    said = f"the values are right, but a step moves {moved:.0f}Ψ"
    if round(moved) == 3 * many:
        return f"{said}: 3Ψ for each of {many} micro-batches. How often do parameters change in a step?"
    if round(moved) == 2 * many:
        return (
            f"{said}: between two micro-batches parameters do not change, so one gather is enough for all. "
            f"That makes {many + 1}Ψ"
        )
    if moved > many + 1.5:
        return f"{said}, and {many + 1}Ψ are enough: one gather, and one reduce-scatter for each micro-batch"
    return _seldom_reduced(ended[0], many)


def _seldom_reduced(seen, many: int) -> str | None:
    """Whether gradients are reduced less often than once in each of `many` micro-batches.

    What is not gathered is reduced. So gathers that are too many can take the place of reductions in the sum.
    """
    moved = seen.passes[-1]
    gathered = sum(sent for call, sent in seen.calls.items() if "all_gather" in call)
    reduced = round(moved - gathered)
    times = f"{reduced} times for {many} micro-batches" if reduced > 1 else "once"
    said = f"the values are right, and a step moves only {moved:.0f}Ψ"
    accumulated = f"whole gradients are accumulated and reduced {times}"
    if moved < many + 0.5:
        return f"{said}: {accumulated}. {NO_ROOM}"
    if gathered > 1.5 and reduced < many:
        return (
            f"{said}, but {gathered:.0f}Ψ of that are gathers: {accumulated}. {NO_ROOM}: gather "
            "once, and reduce each micro-batch's gradient at once"
        )
    return None


def whole_at_rest(case, ended) -> str | None:
    for rank, each in enumerate(ended):
        whole = [name for name, size in each.kept[-1].items() if size >= PSI * ITEM]
        if whole:
            return (
                f"the values are right, but after the step rank {rank} keeps whole parameters, in "
                f"`{whole[0]}`: at stage 3 only shards are left between two steps. A view of the parameters "
                "keeps all of them in memory: clone it"
            )
    return None


def whole_gradients(case, ended) -> str | None:
    """Whether a gradient of an earlier micro-batch is in memory when the next backward begins.

    The last one may be, in a variable of step, beside the parameters.
    """
    for rank, each in enumerate(ended):
        for micro_batch, held in enumerate(each.held[1:-1], 1):
            if held.others:
                return (
                    f"the values are right, but before micro-batch {micro_batch} rank {rank} keeps a whole "
                    f"gradient alive, in `{held.others[0]}`: a view of one, or one itself. Keep a sum of "
                    f"your own shard. {NO_ROOM}"
                )
            if held.whole > 2:
                return (
                    f"the values are right, but before micro-batch {micro_batch} there are {held.whole} "
                    f"tensors in rank {rank}'s memory that are as long as all parameters: whole gradients of "
                    "earlier micro-batches are kept. Reduce each at once, and keep a sum of your own shard"
                )
    return None


def no_forward(case, ended) -> str | None:
    """Whether an engine saves the forward, and not only its gather."""
    for rank, each in enumerate(ended):
        if each.forwards < case.steps * case.micro_batches:
            return (
                f"the values are right, but rank {rank} runs {each.forwards} forwards in {case.steps} steps "
                f"of {case.micro_batches} micro-batches: batch.loss(whole) is the forward, and each "
                "micro-batch needs one"
            )
    return None


def _cost(case, ended) -> str | None:
    looks = sent_for, whole_at_rest, whole_gradients, unsharded, no_forward
    return next(filter(None, (look(case, ended) for look in looks)), None)


# A sentence, and where the ranks end.
# fmt: off
MISTAKES = {
    "each micro-batch has an update of its own, which the next one does not see: add the gradients of all of "
    "them up, and update once in a step":
        lambda case: each_updates_unseen(case, 1 / case.micro_batches),
    "each micro-batch has an update of its own, with its whole gradient, and the next one does not see it: "
    "add the gradients of all of them up, and update once in a step with their mean":
        each_updates_unseen,
    "after all steps gather still returns the parameters of the start: either it keeps what it gathered "
    "first, so gather again after each update, or no update reaches the shard":
        untouched,
}
# fmt: on
TICKET = Ticket(
    Engine12,
    "This is no error, but a price that nobody had read: stage 3 moves 3Ψ in each micro-batch. FairScale "
    "kept its root from one micro-batch to the next for that reason (facebookresearch/fairscale#470). In "
    "verl each micro-batch reduced gradients that only the last one needed reduced "
    "(verl-project/verl#7095). FSDP2 has a setting for each half, `set_reshard_after_backward` and "
    "`set_requires_gradient_sync`.",
    (
        "count the gathers and reduces of a step with four micro-batches.",
        "a gather brings what has changed since the last one. When do parameters change?",
        "gather once, before the first micro-batch, into a local variable, and use it in all forwards and "
        "backwards.",
    ),
    cases=(Case(3, micro_batches=4), Case(2, micro_batches=3), Case(4, micro_batches=4)),
    cost=_cost,
    mistakes=MISTAKES,
    gathers=True,
    memory=True,
)
check_12 = TICKET.check(12, [Repaired])
