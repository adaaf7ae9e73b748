"""The exercises' checks: each is fed every classic wrong solution, and must name that mistake and no other.

A check is worth what it says about wrong solutions. That a right one passes is shown by the solutions that
the notebooks fold away.
"""

import re
import sys

import cloudpickle
import nbformat
import pytest
import torch
import torch.distributed as dist
from support import ROOT

from zerolab import memory, ring
from zerolab.course.checks.collectives import diagnose_reduce_scatter
from zerolab.course.checks.memory import diagnose_bytes_per_gpu
from zerolab.course.checks.ranks import diagnose_average

# A reader's function travels by value from a notebook's cells; so do the solutions here.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

NOTEBOOKS = ROOT / "notebooks"


# ---- lesson 00: the average


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
def test_average_check_names_the_mistake(solution, diagnosis):
    assert diagnosis in diagnose_average(solution)


# ---- lesson 01: bytes per GPU


def formula(k=12, params=2, grads=2, shards=(1, 2, 3), scale=1.0, replicated_master=False):
    """The right formula where nothing is given, and a classic wrong one where something is."""
    on_optimizer, on_grads, on_params = shards

    def bytes_per_gpu(psi, n, stage):
        shared = lambda sharded_from: n if stage >= sharded_from else 1
        optimizer = k * psi / shared(on_optimizer)
        if replicated_master and stage >= 1:
            optimizer = 4 * psi + 8 * psi / n
        return (params * psi / shared(on_params) + grads * psi / shared(on_grads) + optimizer) * scale

    return bytes_per_gpu


@pytest.mark.parametrize(
    ("solution", "diagnosis"),
    [
        (lambda psi, n, stage: None, "not written yet"),
        (formula(k=8), "the fp32 master weights are missing"),
        (formula(replicated_master=True), "only m and v are sharded"),
        (formula(scale=1e-9), "that is GB"),
        (formula(scale=2**-30), "that is GiB"),
        (formula(scale=8), "that is bits"),
        (formula(shards=(1, 1, 3)), "stage 1, 7B parameters on 8 GPUs: that is stage 2"),
        (formula(shards=(0, 0, 0)), "stage 0, 7B parameters on 8 GPUs: that divides everything"),
        (formula(shards=(1, 2, 2)), "stage 2, 7B parameters on 8 GPUs: that is stage 3"),
        (formula(params=4), "and the formula gives"),
    ],
)
def test_memory_check_names_the_mistake(solution, diagnosis):
    assert diagnosis in diagnose_bytes_per_gpu(solution)


# ---- lesson 02: the ring


def ring_with(
    rounds=-1, shift=0, whole=False, floor=False, mean=False, forget=False, mixed=0, owned=0, stale=False
):
    """The right ring where nothing is given, and a classic wrong one where something is."""

    def reduce_scatter(tensor):
        rank, n = dist.get_rank(), dist.get_world_size()
        size = tensor.numel() // n
        cuts = ring.chunks(size * n if floor else tensor.numel(), n)
        pieces = [tensor[cut] for cut in cuts]
        brought = [piece.clone() for piece in pieces]
        for step in range(n + rounds):
            sent, received = (rank - step - 1 + shift) % n, (rank - step - 2 + shift + mixed) % n
            outgoing = tensor if whole else brought[sent] if stale else pieces[sent]
            landing = torch.empty_like(tensor if whole else pieces[received])
            there, origin = (rank + 1) % n, (rank - 1) % n
            pair = [dist.P2POp(dist.isend, outgoing, there), dist.P2POp(dist.irecv, landing, origin)]
            for work in dist.batch_isend_irecv(pair):
                work.wait()
            pieces[received] += landing[cuts[received]] if whole else landing
        if forget:
            return None
        own = pieces[(rank + owned) % n]
        return own / n if mean else own

    return reduce_scatter


def everyone_to_owner(tensor):
    """A reduce-scatter with the right values and the right bytes that is no ring."""
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = [tensor[cut] for cut in ring.chunks(tensor.numel(), n)]
    for distance in range(1, n):
        landing = torch.empty_like(pieces[rank])
        there, origin = (rank + distance) % n, (rank - distance) % n
        pair = [dist.P2POp(dist.isend, pieces[there], there), dist.P2POp(dist.irecv, landing, origin)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        pieces[rank] += landing
    return pieces[rank]


def deadlocked(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = [tensor[cut] for cut in ring.chunks(tensor.numel(), n)]
    for step in range(n - 1):
        landing = torch.empty_like(pieces[(rank - step - 2) % n])
        dist.send(pieces[(rank - step - 1) % n], (rank + 1) % n)
        dist.recv(landing, (rank - 1) % n)
        pieces[(rank - step - 2) % n] += landing
    return pieces[rank]


def by_all_reduce(tensor):
    dist.all_reduce(tensor)
    return tensor[ring.chunks(tensor.numel(), dist.get_world_size())[dist.get_rank()]]


def whole_sum(tensor):
    ring_with()(tensor)
    ring.all_gather(tensor)
    return tensor


@pytest.mark.parametrize(
    ("solution", "diagnosis"),
    [
        (lambda tensor: None, "not written yet"),
        (ring_with(whole=True), "sends the whole tensor each round"),
        (ring_with(mean=True), "that is the mean"),
        (ring_with(floor=True), "the remainder is dropped: 11 elements on 3 ranks came back as 3 + 3 + 3"),
        (ring_with(shift=1), "nothing was added to"),
        (ring_with(shift=1, owned=1), "rank 0 ended with chunk 1"),
        (ring_with(rounds=-2), "rank 0 made 2 rounds, and 4 ranks need 3"),
        (ring_with(rounds=0), "one round too many"),
        (ring_with(mixed=2), "added elements of one chunk to another"),
        (ring_with(stale=True), "is missing from rank 0's chunk: pass on the partial sum"),
        (ring_with(forget=True), "returned NoneType, not its chunk"),
        (whole_sum, "every rank returned the whole tensor"),
        (everyone_to_owner, "in a ring it talks to rank"),
        (by_all_reduce, "torch's own allreduce"),
        (deadlocked, "deadlock"),
    ],
)
def test_ring_check_names_the_mistake(solution, diagnosis):
    assert diagnosis in diagnose_reduce_scatter(solution)


# ---- the solutions that the notebooks fold away

EXERCISES = {
    "00_ranks": ("average", diagnose_average),
    "01_memory_accounting": ("bytes_per_gpu", diagnose_bytes_per_gpu),
    "02_collectives": ("my_reduce_scatter", diagnose_reduce_scatter),
}


@pytest.mark.parametrize("lesson", EXERCISES)
def test_the_folded_solution_passes_its_check(lesson):
    name, diagnose = EXERCISES[lesson]
    book = nbformat.read(NOTEBOOKS / f"{lesson}.ipynb", as_version=4)
    text = "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    (solution,) = re.findall(rf"<details>.*?```python\n(def {name}\(.*?)```", text, flags=re.DOTALL)
    scope = {"torch": torch, "dist": dist, "ring": ring, "memory": memory}
    exec(solution, scope)
    assert diagnose(scope[name]) is None
