"""Lesson 00: the check of passing a tensor on names each mistake, a deadlock too."""

import pytest
import torch
import torch.distributed as dist
from support.answers import alone, together
from support.lessons import solutions_travel_by_value

from zerolab import ring
from zerolab.course import attempts
from zerolab.course.lessons.ranks import check_shift
from zerolab.course.targets import Reached

solutions_travel_by_value(__name__)


def neighbours():
    rank, n = dist.get_rank(), dist.get_world_size()
    return rank, (rank + 1) % n, (rank - 1) % n


def passed_on(finish=lambda own, theirs: theirs, first=lambda rank: rank == 0, rounds=1, way=1):
    """Right where nothing is given, and a classic wrong one where something is."""

    def shift(own):
        rank, right, left = neighbours()
        to, origin = (right, left) if way == 1 else (left, right)
        passing = own
        for _ in range(rounds):
            theirs = torch.empty_like(own)
            calls = [lambda: dist.send(passing, to), lambda: dist.recv(theirs, origin)]  # noqa: B023
            for call in calls if first(rank) else reversed(calls):
                call()
            passing = theirs
        return finish(own, theirs)

    return shift


def by_handles(own):
    """Right: the send is started and waited for later."""
    _, right, left = neighbours()
    theirs, work = torch.empty_like(own), dist.isend(own, right)
    dist.recv(theirs, left)
    work.wait()
    return theirs


def both_at_once(own):
    """Right: both are started together."""
    _, right, left = neighbours()
    theirs = torch.zeros_like(own)
    pair = [dist.P2POp(dist.isend, own, right), dist.P2POp(dist.irecv, theirs, left)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    return theirs


def in_its_own_tensor(own):
    """Right: a copy travels, and what arrives overwrites the tensor that was given."""
    _, right, left = neighbours()
    work = dist.isend(own.clone(), right)
    dist.recv(own, left)
    work.wait()
    return own


def with_barriers(own):
    """Right: a barrier moves no tensor."""
    rank, right, left = neighbours()
    dist.barrier()
    theirs = torch.empty_like(own)
    calls = [lambda: dist.send(own, right), lambda: dist.recv(theirs, left)]
    for call in calls if rank == 0 else reversed(calls):
        call()
    dist.barrier()
    return theirs


def everything_to_everyone(own, pick=lambda found, rank: found[rank - 1]):
    """Bronze: all tensors go everywhere."""
    rank, n = dist.get_rank(), dist.get_world_size()
    found = [torch.empty_like(own) if each != rank else own for each in range(n)]
    works = [dist.isend(own, each) for each in range(n) if each != rank]
    for each in range(n):
        if each != rank:
            dist.recv(found[each], each)
    for work in works:
        work.wait()
    return pick(found, rank)


def in_two_halves(own):
    """Bronze: as many bytes as one message has, in two."""
    half, found = own.numel() // 2, torch.empty_like(own)
    for part in (slice(None, half), slice(half, None)):
        found[part] = RIGHT[0](own[part])
    return found


def from_rank_0_to_all(own):
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.recv(own, 0)
    for other in range(1, n * (rank == 0)):
        dist.send(own, other)
    return own


def its_number(own):
    return RIGHT[0](torch.full_like(own, dist.get_rank()))


def zeros(own):
    return RIGHT[0](torch.zeros_like(own))


def handed_down(own):
    """What has arrived is passed on, so that rank 0's tensor goes through all."""
    rank, right, left = neighbours()
    if rank == 0:
        dist.send(own, right)
        dist.recv(own.clone(), left)
        return own
    dist.recv(own, left)
    dist.send(own, right)
    return own


def without_a_way_back(own):
    rank, n = dist.get_rank(), dist.get_world_size()
    theirs = own.clone()
    if rank > 0:
        dist.recv(theirs, rank - 1)
    if rank + 1 < n:
        dist.send(own, rank + 1)
    return theirs


def without_modulo(own):
    rank, theirs = dist.get_rank(), torch.empty_like(own)
    if rank == 0:
        dist.send(own, rank + 1)
        dist.recv(theirs, rank - 1)
    else:
        dist.recv(theirs, rank - 1)
        dist.send(own, rank + 1)
    return theirs


def into_empty_memory(own):
    """Rank 0 returns a buffer into which nothing was received."""
    rank, n = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    if rank > 0:
        dist.recv(theirs, rank - 1)
    if rank + 1 < n:
        dist.send(own, rank + 1)
    return theirs


def into_memory_never_written(own):
    """The same with numbers that memory may hold, so that the test sees them each time."""
    found = into_empty_memory(own)
    if dist.get_rank() == 0:
        found[::2], found[1::2] = 4.677e-310, 6.946e-310
    return found


def by_the_package(own):
    ring.all_gather(own)
    return own


RIGHT = [
    passed_on(),
    passed_on(first=lambda rank: rank % 2 == 0),
    passed_on(first=lambda rank: rank != 1),
    by_handles,
    both_at_once,
    in_its_own_tensor,
    with_barriers,
]


def from_the_rank_it_sends_to(own):
    """With two ranks it is the one before, too."""
    rank, n = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    if rank % 2 == 0:
        dist.send(own, (rank + 1) % n)
        dist.recv(theirs, (rank + 1) % n)
    else:
        dist.recv(theirs, (rank + 1) % n)
        dist.send(own, (rank + 1) % n)
    return theirs


def odd_ranks_to_the_left(own):
    """Rank 0 has waited for its message, and nobody receives rank 1's."""
    rank, right, left = neighbours()
    theirs, work = torch.empty_like(own), dist.isend(own, left if rank % 2 else right)
    dist.recv(theirs, left)
    work.wait()
    return theirs


def all_the_way(own):
    for _ in range(dist.get_world_size() - 1):
        own = RIGHT[0](own)
    return own


WRONG = [
    (all_the_way, "each tensor was passed on N-1 times"),
    (lambda own: None, "not written yet"),
    (lambda own: own, "it returned its own tensor: return the one that arrived"),
    (passed_on(way=-1), "it returned its right neighbour's tensor"),
    (passed_on(rounds=2), "from two ranks before: one round is enough"),
    (passed_on(finish=lambda own, theirs: own + theirs), "added to its own tensor"),
    (passed_on(finish=lambda own, theirs: (own + theirs) / 2), "averaged with its own tensor"),
    (passed_on(finish=lambda own, theirs: theirs.tolist()), "list, with the right numbers in it"),
    (passed_on(finish=lambda own, theirs: theirs.float()), "float32, and its input is float64"),
    (passed_on(finish=lambda own, theirs: torch.zeros_like(own)), "all zeros"),
    (handed_down, "every rank returned rank 0's tensor: pass on your own"),
    (without_a_way_back, "the tensors end at the last rank, and rank 0 gets none"),
    (
        alone(odd_ranks_to_the_left),
        "rank 2 waits for a message from rank 1 that was never sent: rank 1 waits, too, and it sent a",
    ),
    (alone(without_modulo), "receives from rank -1, and the ranks are 0 to 2"),
    (lambda own: everything_to_everyone(own, lambda found, rank: sum(found)), "that is the sum of all"),
    (lambda own: everything_to_everyone(own, lambda found, rank: torch.stack(found)), "were stacked"),
    (by_the_package, "zerolab's own ring.all_gather"),
    (from_rank_0_to_all, "rank 0's tensor, and no other rank sent any: each rank has to send its own"),
    (lambda own: everything_to_everyone(own, lambda found, _: found[0]), "return the tensor of rank - 1"),
    (its_number, "rank 1 sends a tensor whose elements are all 1, which is its own number: send the"),
    (zeros, "rank 0 sends zeros"),
    (
        alone(into_empty_memory),  # among others it finds the tensors that they have left in memory
        "rank 0 receives nothing: let it receive from (rank - 1) % world_size, which is rank 2",
    ),
    (
        into_memory_never_written,
        "holds numbers such as 4.677e-310, as memory does that was never written; rank 0 receives nothing",
    ),
]
diagnose = together(
    check_shift, [*RIGHT, everything_to_everyone, in_two_halves, *(wrong for wrong, _ in WRONG)]
)


@pytest.mark.parametrize("right", RIGHT)
def test_every_right_way_passes(right):
    assert diagnose(right) is None


@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_the_check_names_the_mistake(wrong, words):
    found = diagnose(wrong)
    assert words in found and not isinstance(found, Reached)


def test_more_messages_than_one_are_bronze():
    found = diagnose(everything_to_everyone)
    assert isinstance(found, Reached) and "rank 0 sends 2 messages to ranks 1 and 2, and one is" in found
    found = diagnose(in_two_halves)
    assert isinstance(found, Reached) and "rank 0 sends 2 messages to rank 1, and one is enough" in found


def test_a_chain_is_not_taken_for_a_broadcast_nor_the_other_way_round():
    assert "no other rank" not in diagnose(handed_down)
    assert "has just arrived" not in diagnose(from_rank_0_to_all)


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (True, "all of them send first: rank 0 waits until rank 1 receives its message"),
        (False, "all of them receive first: rank 0 waits for a message from rank 2"),
    ],
)
def test_a_deadlock_is_named(monkeypatch, first, words):
    monkeypatch.setattr(attempts, "SECONDS", 2.5)
    assert words in check_shift.diagnose(passed_on(first=lambda rank: first))


def test_a_peer_that_is_right_for_two_ranks_only_is_named(monkeypatch):
    monkeypatch.setattr(attempts, "SECONDS", 2.5)
    said = check_shift.diagnose(from_the_rank_it_sends_to)
    assert "sends to (rank + 1) % 3 and receives from (rank + 1) % 3, so nobody receives what is sent" in said
