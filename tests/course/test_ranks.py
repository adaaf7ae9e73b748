"""Lesson 00: its check names each classic mistake, its drawings say what they show."""

import time

import pytest
import torch
import torch.distributed as dist
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


def everyone_to_everyone(own):
    """Right: each rank sends to all others and adds up for itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    others = [peer for peer in range(size) if peer != rank]
    landing = {peer: torch.empty_like(own) for peer in others}
    sends = [dist.isend(own, peer) for peer in others]
    for peer in others:
        dist.recv(landing[peer], peer)
    for work in sends:
        work.wait()
    landing[rank] = own
    return torch.stack([landing[peer] for peer in range(size)]).mean(dim=0)


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


def sends_first(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    dist.send(own, (rank + 1) % world_size)
    dist.recv(theirs, (rank - 1) % world_size)
    return (own + theirs) / world_size


def reduced_by_torch(own):
    dist.all_reduce(own)
    return own / dist.get_world_size()


def reduced_by_the_package(own):
    ring.all_reduce(own)
    return own / dist.get_world_size()


def averages_in_halves(own):
    """A mean of means on rank 0."""
    return through_rank_0(lambda total, n: total, add=lambda total, theirs: total.add_(theirs).div_(2))(own)


RIGHT = [
    through_rank_0(lambda total, n: total / n),
    everyone_to_everyone,
    around_the_ring,
    along_a_chain,
]
WRONG = [
    (alone(for_two_ranks), "sends to rank -1, and the ranks are 0 to 2: count modulo the number of ranks"),
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
    (through_rank_0(lambda total, n: (total / n).half().double()), "went through float16"),
    (
        alone(through_rank_0(lambda total, n: total / n, buffer=lambda own: own[:7].clone())),
        "7 elements of float64",
    ),
    (averages_in_halves, "mean of means"),
    (lambda own: own.clone(), "nothing that arrived was used"),
    (lambda own: own.tolist(), "returned list"),
    (lambda own: own.float(), "float32, and its input is float64"),
    (lambda own: around_the_ring(own, steps=-2), "is missing"),
    (lambda own: around_the_ring(own, growing=True), "what goes around is the growing sum"),
    (lambda own: around_the_ring(own, steps=0), "counts 2 times"),
    (lambda own: along_a_chain(own, back=False), "sum up to itself, divided"),
    (lambda own: along_a_chain(own, back=False, divide=False), "sum up to itself: the total"),
    (reduced_by_torch, "torch's own dist.all_reduce"),
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
