"""Lesson 00: its check names each classic mistake, its drawings say what they show."""

import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from support.answers import alone, together
from support.lessons import solutions_travel_by_value, spoken

import zerolab
from zerolab import ring
from zerolab.course import attempts, hang_report
from zerolab.course.lessons.ranks import check_average, figures

solutions_travel_by_value(__name__)


def through_rank_0(finish, back=True, add=torch.Tensor.add_, buffer=torch.empty_like):
    """All send to rank 0, which returns what `finish(total, world_size)` makes of the sum."""

    def average(own):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if rank > 0:
            dist.send(own, dst=0)
            mean = own.clone()
            if back:
                dist.recv(mean, src=0)
            return mean
        total, theirs = own.clone(), buffer(own)
        for other in range(1, world_size):
            dist.recv(theirs, src=other)
            add(total, theirs)
        mean = finish(total, world_size)
        if back:
            for other in range(1, world_size):
                dist.send(mean, dst=other)
        return mean

    return average


def everyone_to_everyone(own, combine=lambda every: every.mean(dim=0)):
    """Right, with a knob for what is made of all: each rank sends to all others and adds up for itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    others = [peer for peer in range(size) if peer != rank]
    landing = {peer: torch.empty_like(own) for peer in others}
    sends = [dist.isend(own, peer) for peer in others]
    for peer in others:
        dist.recv(landing[peer], peer)
    for work in sends:
        work.wait()
    landing[rank] = own
    return combine(torch.stack([landing[peer] for peer in range(size)]))


def around_the_ring(own, steps=-1, divide=True, growing=False):
    """Right: each tensor travels around the ring once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total, passing = own.clone(), own.clone()
    for _ in range(size + steps):
        arriving = torch.empty_like(own)
        messages = [
            dist.P2POp(dist.isend, passing, (rank + 1) % size),
            dist.P2POp(dist.irecv, arriving, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        total += arriving
        passing = total.clone() if growing else arriving
    return total.div_(size) if divide else total


def along_a_chain(own, back=True, divide=True):
    """Right: the running total goes up the ranks, the mean comes down."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total, below = own.clone(), torch.zeros_like(own)
    if rank > 0:
        dist.recv(below, rank - 1)
        total += below
    if rank + 1 < size:
        dist.send(total, rank + 1)
    if divide:
        total /= size
    if back and rank + 1 < size:
        dist.recv(total, rank + 1)
    if back and rank > 0:
        dist.send(total, rank - 1)
    return total


def for_two_ranks(own):
    """Its peer is 1 - rank, which is no rank from rank 2 on."""
    theirs, peer = torch.empty_like(own), 1 - dist.get_rank()
    for call, tensor in ((dist.send, own), (dist.recv, theirs))[:: 1 if peer else -1]:
        call(tensor, peer)
    return (own + theirs) / 2


def with_rank_0(own):
    """Rank 0 exchanges messages with rank 1, and each other rank tries to with rank 0."""
    theirs, peer = torch.empty_like(own), int(dist.get_rank() == 0)
    for call, tensor in ((dist.send, own), (dist.recv, theirs))[:: 1 if peer else -1]:
        call(tensor, peer)
    return (own + theirs) / 2


def one_rank_on(own):
    """The ranks but 0 send to the rank before them, and rank 0 receives from all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    theirs = own.clone()
    if rank == 0:
        for other in range(1, size):
            dist.recv(theirs, other)
    else:
        dist.send(own, rank - 1)
    return theirs


def sends_first(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    dist.send(own, (rank + 1) % world_size)
    dist.recv(theirs, (rank - 1) % world_size)
    return (own + theirs) / world_size


def reduced_by_torch(own):
    dist.all_reduce(own)
    return own / dist.get_world_size()


def reduced_by_a_function(own):
    return functional_collectives.all_reduce(own, "sum", dist.group.WORLD) / dist.get_world_size()


def reduced_by_the_package(own):
    ring.all_reduce(own)
    return own / dist.get_world_size()


def averages_in_halves(own):
    """A mean of means on rank 0."""
    return through_rank_0(lambda total, n: total, add=lambda total, theirs: total.add_(theirs).div_(2))(own)


def adds_to_what_it_was_given(own):
    """Right: rank 0 adds in place, and the others receive into the tensor that they have sent."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.send(own, 0)
        dist.recv(own, 0)
        return own
    theirs = torch.empty_like(own)
    for other in range(1, world_size):
        dist.recv(theirs, other)
        own += theirs
    own /= world_size
    for other in range(1, world_size):
        dist.send(own, other)
    return own


def received_into_its_own(own, add=torch.Tensor.add, root=0):
    """`total` is another name of `own`, and what arrives there replaces it."""
    rank, others = dist.get_rank(), [each for each in range(dist.get_world_size()) if each != root]
    mean = torch.empty_like(own)
    if rank != root:
        dist.send(own, root)
        dist.recv(mean, root)
        return mean
    total = own
    for other in others:
        dist.recv(own, other)
        total = add(total, own)
    mean = total / dist.get_world_size()
    for other in others:
        dist.send(mean, other)
    return mean


def one_of_the_messages(own, keep, order=1):
    """Rank 0 adds one of the messages, the first or the last."""
    rank, others = dist.get_rank(), list(range(1, dist.get_world_size()))[::order]
    theirs = torch.empty_like(own)
    if rank > 0:
        dist.send(own, 0)
        dist.recv(theirs, 0)
        return theirs
    found = [(dist.recv(theirs, other), theirs.clone())[1] for other in others]
    mean = (own + found[keep]) / dist.get_world_size()
    for other in others:
        dist.send(mean, other)
    return mean


def passed_on_with_what_was_added(own):
    """Ranks exchange in turns, and each sends the sum that it has so far, in the tensor that it was given."""
    rank, theirs = dist.get_rank(), torch.empty_like(own)
    for other in (each for each in range(dist.get_world_size()) if each != rank):
        for call in (dist.send, dist.recv)[:: 1 if rank < other else -1]:
            call(own if call is dist.send else theirs, other)
        own += theirs
    return own / dist.get_world_size()


def every_message_twice(own):
    rank, others = dist.get_rank(), range(1, dist.get_world_size())
    total, theirs = own.clone(), torch.empty_like(own)
    for other in others:
        for _ in range(1 + (other == 1)):
            if rank == 0:
                dist.recv(theirs, other)
                total += theirs
            elif rank == other:
                dist.send(own, 0)
    mean = total / dist.get_world_size()
    for other in others:
        if rank == 0:
            dist.send(mean, other)
        elif rank == other:
            dist.recv(mean, 0)
    return mean


def answered_at_once(own):
    """Rank 0 answers each rank with the sum so far."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.send(own, 0)
        dist.recv(own, 0)
        return own
    total, theirs = own.clone(), torch.empty_like(own)
    for other in range(1, n):
        dist.recv(theirs, other)
        total += theirs
        dist.send(total / n, other)
    return total / n


def only_what_arrives(own):
    return through_rank_0(lambda total, n: (total - own) / n)(own)


def one_never_sends(own):
    """Only ranks 0 and 1 take part. Rank 2 gets their sum."""
    rank, n = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    if rank == 1:
        dist.send(own, 0)
    if rank == 0:
        dist.recv(theirs, 1)
        for other in range(1, n):
            dist.send((own + theirs) / n, other)
        return (own + theirs) / n
    dist.recv(theirs, 0)
    return theirs


def without_a_wait(own):
    """The handle of the first send is gone before rank 0 receives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.isend(own, 0)
        mean = torch.empty_like(own)
        dist.recv(mean, 0)
        return mean
    total, theirs = own.clone(), torch.empty_like(own)
    for peer in range(1, size):
        time.sleep(0.5)
        dist.recv(theirs, peer)
        total += theirs
    for peer in range(1, size):
        dist.send(total / size, peer)
    return total / size


RIGHT = [
    adds_to_what_it_was_given,
    through_rank_0(lambda total, n: total / n),
    everyone_to_everyone,
    around_the_ring,
    along_a_chain,
]


def mean_of_the_elements(own):
    return torch.full_like(own, RIGHT[1](own).mean().item())


def in_double_buffers(own):
    """Right for a gradient of float64 alone."""
    received = torch.empty(own.shape, dtype=torch.float64)
    return by_way_of_rank_0(own, received)


def by_way_of_rank_0(own, received):
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.send(own, 0)
        dist.recv(received, 0)
        return received
    total = own.clone()
    for other in range(1, size):
        dist.recv(received, other)
        total += received
    for other in range(1, size):
        dist.send(total / size, other)
    return total / size


WRONG = [
    (
        lambda own: through_rank_0(lambda total, n: total / n, add=torch.Tensor.copy_)(own).float(),
        "are missing",
    ),
    (alone(without_a_wait), "rank 0 waits for the message that rank 1 started and did not wait for: until"),
    (alone(in_double_buffers), "receives them into a tensor of 40 elements of float64"),
    (answered_at_once, "each rank has the sum up to itself, divided: the total of all ranks has to reach"),
    (only_what_arrives, "rank 0 adds up what arrives, without its own numbers"),
    (one_never_sends, "rank 2's gradient is missing: rank 2 sends nothing"),
    (mean_of_the_elements, "in all elements, and those of the right one differ"),
    (alone(for_two_ranks), "Ranks 0 and 1 exchange messages as a pair, and with 3 ranks rank 2 has no such"),
    (alone(with_rank_0), "Ranks 0 and 1 send to each other and receive from each other, and address no"),
    (alone(with_rank_0), "That is an exchange of two ranks, and here are 3: find peers for any number of"),
    (lambda own: None, "not written yet"),
    (through_rank_0(lambda total, n: total), "that is the sum"),
    (through_rank_0(lambda total, n: total / 2), "divided by 2, whatever the number"),
    (through_rank_0(lambda total, n: total / (n - 1)), "divided by N-1"),
    (through_rank_0(lambda total, n: total / n**2), "divided by world_size twice"),
    (through_rank_0(lambda total, n: total / 7), "what is there is 3/7 times what it should be"),
    (
        through_rank_0(lambda total, n: total / n, back=False),
        "rank 0 is right, but rank 1 is not: it returned its own gradient",
    ),
    (
        through_rank_0(lambda total, n: total / n, add=torch.Tensor.copy_),
        "rank 0's gradient and rank 1's",
    ),
    (
        through_rank_0(lambda total, n: total / n, add=torch.Tensor.maximum),
        "nothing that arrived was added",
    ),
    (alone(through_rank_0(lambda total, n: (total / n).half().double())), "went through float16"),
    (
        alone(through_rank_0(lambda total, n: total / n, buffer=lambda own: own[:7].clone())),
        "7 elements of float64",
    ),
    (averages_in_halves, "mean of means"),
    (lambda own: everyone_to_everyone(own, lambda every: every.amin(dim=0)), "that is the smallest of"),
    (lambda own: everyone_to_everyone(own, lambda every: every.median(dim=0).values), "torch.median gives"),
    (lambda own: everyone_to_everyone(own, lambda every: every.quantile(0.5, dim=0)), "torch.quantile gives"),
    (received_into_its_own, "rank 0 receives into the tensor that it was given"),
    (lambda own: received_into_its_own(own, root=1), "rank 1 receives into the tensor that it was given"),
    (
        lambda own: received_into_its_own(own, torch.Tensor.add_),
        "its own numbers are no longer there when they are needed",
    ),
    (lambda own: one_of_the_messages(own, -1), "only what came last is in the result"),
    (lambda own: one_of_the_messages(own, 0), "only what came first is in the result"),
    (lambda own: one_of_the_messages(own, -1, order=-1), "only what came last is in the result"),
    (passed_on_with_what_was_added, "sends the tensor that it was given after it has changed it in place"),
    (every_message_twice, "rank 0 receives 2 messages from rank 1"),
    (lambda own: own.clone(), "nothing that arrived was used"),
    (lambda own: own.tolist(), "returned list"),
    (lambda own: own.float(), "float32, and its input is float64"),
    (lambda own: around_the_ring(own, steps=-2), "is missing"),
    (lambda own: around_the_ring(own, growing=True), "what goes around is the growing sum"),
    (lambda own: around_the_ring(own, steps=0), "counts 2 times"),
    (lambda own: along_a_chain(own, back=False), "sum up to itself, divided"),
    (lambda own: along_a_chain(own, back=False, divide=False), "sum up to itself: the total"),
    (reduced_by_torch, "torch's own dist.all_reduce"),
    (reduced_by_a_function, "torch's own dist.all_reduce"),
    (reduced_by_the_package, "zerolab's own ring.all_reduce"),
]
diagnose = together(check_average, [*RIGHT, *(wrong for wrong, _ in WRONG)])


@pytest.mark.parametrize(
    "solution",
    RIGHT,
)
def test_every_right_way_passes(solution):
    assert diagnose(solution) is None


@pytest.mark.parametrize(
    ("solution", "diagnosis"),
    WRONG,
)
def test_the_check_names_the_mistake(solution, diagnosis):
    assert diagnosis in diagnose(solution)


def test_a_deadlock_is_named(monkeypatch):
    monkeypatch.setattr(attempts, "SECONDS", 2.5)
    assert "deadlock" in check_average.diagnose(sends_first)


def test_a_message_to_a_rank_that_does_not_receive_it_is_named(monkeypatch):
    monkeypatch.setattr(attempts, "SECONDS", 2.5)
    found = check_average.diagnose(one_rank_on)
    assert "rank 0 waits for a message from rank 2 that was never sent" in found
    assert "it sent a message to rank 1 that has not been received" in found


def test_the_diagram_says_what_it_shows():
    assert spoken(figures.separate_memories, 1.5).startswith("4 separate boxes")


def test_the_report_of_a_hang_has_the_readers_own_lines():
    """Without a path and without a line of torch, and with the ranks that wait."""

    def send_first():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        dist.send(torch.ones(1), (rank + 1) % world_size)

    def one_is_late():
        if dist.get_rank() == 1:
            time.sleep(60)
        dist.barrier()

    with pytest.raises(zerolab.LaunchTimeout) as caught:
        zerolab.launch(send_first, 2, timeout=2)
    report = hang_report(caught.value)
    assert report.count("dist.send(torch.ones(1), (rank + 1) % world_size)") == 2
    assert "rank 0's stack:\n  line " in report and report.count("\n  line ") == 2 and "/" not in report
    with pytest.raises(zerolab.LaunchTimeout) as caught:
        zerolab.launch(one_is_late, 2, timeout=2)
    report = hang_report(caught.value)
    assert "rank 1's stack:\n" in report and "time.sleep(60)" in report and "rank 0's stack" not in report
    assert report.endswith("waiting for another rank: rank 0")
