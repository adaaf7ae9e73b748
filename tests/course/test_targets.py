"""Promise: where right answers differ in bytes or in memory at once, a check says which target one reached.

The targets of the other exercises are tested beside their checks.
"""

import pytest
import torch
import torch.distributed as dist
from support.lessons import solutions_travel_by_value

from zerolab import ring
from zerolab.course.lessons.collectives import check_reduce_scatter
from zerolab.course.lessons.collectives.solution import my_reduce_scatter
from zerolab.course.lessons.zero_stage_1 import check_zero1
from zerolab.course.lessons.zero_stage_1.solution import MyZero1
from zerolab.course.lessons.zero_stage_2 import check_reduce_and_keep
from zerolab.course.lessons.zero_stage_2.solution import reduce_and_keep
from zerolab.course.peak import Peak
from zerolab.course.targets import before_it

solutions_travel_by_value(__name__)


def on_a_copy(tensor):
    return my_reduce_scatter(tensor.clone())


def a_buffer_for_each_round(tensor):
    """Keeps what arrives in each round, so that many chunks are there at once."""
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces, buffers = [tensor[cut] for cut in ring.chunks(tensor.numel(), n)], []
    for step in range(n - 1):
        buffers.append(torch.empty_like(pieces[(rank - step - 2) % n]))
        pair = [dist.P2POp(dist.isend, pieces[(rank - step - 1) % n], (rank + 1) % n)]
        pair.append(dist.P2POp(dist.irecv, buffers[-1], (rank - 1) % n))
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        pieces[(rank - step - 2) % n] += buffers[-1]
    return pieces[rank].clone()


def with_bound_handles(tensor):
    """The sum travels in buffers. `send` and `receive` keep those of the round before."""
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = ring.chunks(tensor.numel(), n)
    travelling = tensor[pieces[(rank - 1) % n]]
    for step in range(n - 1):
        own = tensor[pieces[(rank - step - 2) % n]]
        arriving = torch.empty_like(own)
        receive = dist.irecv(arriving, (rank - 1) % n)
        send = dist.isend(travelling, (rank + 1) % n)
        send.wait()
        receive.wait()
        arriving += own
        travelling = arriving
    return travelling if n > 1 else tensor


class ScalesTheWholeGradient(MyZero1):
    def step(self, gradient):
        self.shard.grad = ring.reduce_scatter(gradient / self.world_size)
        self.optimizer.step()
        ring.all_gather(self.flat)


class ScalesAndCopies(MyZero1):
    def step(self, gradient):
        self.shard.grad = ring.reduce_scatter(gradient / self.world_size).clone()
        self.optimizer.step()
        ring.all_gather(self.flat)


class KeepsItsShard(MyZero1):
    """The optimizer has a copy of the shard: no whole tensor, and more than four shards at once."""

    def __init__(self, flat, optimizer_class, lr):
        self.flat, self.world_size = flat, dist.get_world_size()
        self.mine = ring.chunks(flat.numel(), self.world_size)[dist.get_rank()]
        self.shard = flat[self.mine].clone()
        self.optimizer = optimizer_class([self.shard], lr=lr)

    def step(self, gradient):
        before = [self.shard.clone(), gradient[self.mine].clone()]
        self.shard.grad = ring.reduce_scatter(gradient) / self.world_size
        self.optimizer.step()
        self.flat[self.mine] = self.shard
        before.clear()
        ring.all_gather(self.flat)


def reduces_a_copy(flat, kept):
    mine = ring.reduce_scatter(flat.clone()).clone()
    return mine if kept is None else kept + mine


GOLD = {
    my_reduce_scatter: check_reduce_scatter,
    with_bound_handles: check_reduce_scatter,
    MyZero1: check_zero1,
    KeepsItsShard: check_zero1,
    reduce_and_keep: check_reduce_and_keep,
}
SILVER = {
    on_a_copy: (check_reduce_scatter, "beside the tensor of 8008, a second one of full size"),
    a_buffer_for_each_round: (check_reduce_scatter, "bytes at once beside the tensor of 8008"),
    ScalesTheWholeGradient: (
        check_zero1,
        "keeps a tensor of 4004 bytes between the steps (look at `self.shard.grad`)",
    ),
    ScalesAndCopies: (check_zero1, "has a tensor of 4004 bytes in a step, beside flat"),
    reduces_a_copy: (check_reduce_and_keep, "has a tensor of 3072 bytes in a call, beside flat"),
}


@pytest.mark.parametrize("answer", GOLD)
def test_an_answer_without_whole_copies_reaches_gold(answer):
    result = GOLD[answer](answer)
    assert result and result.message.startswith("Gold: ")


@pytest.mark.parametrize("answer", SILVER)
def test_a_right_answer_that_holds_more_passes_with_silver(answer):
    check, says = SILVER[answer]
    result = check(answer)
    assert result and result.message.startswith("Silver, because values and bytes are right. For gold: ")
    assert says in result.message


def test_the_peak_counts_all_storages_and_the_largest():
    given = torch.ones(100)
    with Peak([given]) as peak:
        first = given + 1
        parts = [given[:10].clone() for _ in range(3)]
    assert (peak.nbytes, peak.largest) == (first.nbytes + 3 * parts[0].nbytes, first.nbytes)
    with Peak([given]) as peak:
        given.add_(1)
    assert (peak.nbytes, peak.largest) == (0, 0)


@pytest.mark.parametrize(
    "cost", ["rank 0 sends 7992 bytes", "the values are right, but rank 0 sends 7992 bytes"]
)
def test_what_was_right_before_a_stop_is_said_once(cost):
    assert before_it([cost]) == "before this case the values are right, but rank 0 sends 7992 bytes"
