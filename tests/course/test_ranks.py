"""Lesson 00: its check names each classic mistake, its drawings say what they show."""

import pytest
import torch
import torch.distributed as dist
from support.lessons import solutions_travel_by_value, spoken

from zerolab.course.lessons.ranks import check_average, figures

solutions_travel_by_value(__name__)


def average_with(divide, reply=lambda mean, own: mean, back=True):
    def average(own):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if rank > 0:
            dist.send(own, dst=0)
            mean = own.clone()
            if back:
                dist.recv(mean, src=0)
            return mean
        total, theirs = own.clone(), torch.empty_like(own)
        for other in range(1, world_size):
            dist.recv(theirs, src=other)
            total += theirs
        mean = divide(total, world_size)
        if back:
            for other in range(1, world_size):
                dist.send(mean, dst=other)
        return mean

    return average


def sends_first(own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(own)
    dist.send(own, (rank + 1) % world_size)
    dist.recv(theirs, (rank - 1) % world_size)
    return (own + theirs) / world_size


def reduced_by_torch(own):
    dist.all_reduce(own)
    return own / dist.get_world_size()


@pytest.mark.parametrize(
    ("solution", "diagnosis"),
    [
        (lambda own: None, "not written yet"),
        (average_with(lambda total, n: total), "that is the sum"),
        (average_with(lambda total, n: total / 2), "divided by 2 where there are 3 ranks"),
        (average_with(lambda total, n: total / n**2), "divided by world_size twice"),
        (average_with(lambda total, n: total / n, back=False), "rank 1 still has its own gradient"),
        (lambda own: own.clone(), "nothing that arrived was used"),
        (lambda own: own.tolist(), "returned list"),
        (reduced_by_torch, "torch's own allreduce"),
        (sends_first, "deadlock"),
    ],
)
def test_the_check_names_the_mistake(solution, diagnosis):
    assert diagnosis in check_average.diagnose(solution)


def test_the_diagram_says_what_it_shows():
    assert spoken(figures.separate_memories, 1.5).startswith("4 separate boxes")
