"""Promise: an answer that does not wait for its messages is named, whatever values it happened to get."""

import os
import signal
from operator import methodcaller

import pytest
import torch
import torch.distributed as dist
from support.lessons import solutions_travel_by_value

from zerolab import ring
from zerolab.course import attempts
from zerolab.course.attempts import attempt
from zerolab.course.lessons.collectives import check_reduce_scatter
from zerolab.course.lessons.data_parallel import check_average_gradients
from zerolab.course.lessons.ranks import check_average, check_shift
from zerolab.course.wire import Wire

solutions_travel_by_value(__name__)


def ring_that_waits_for(waited, made=lambda chunk: chunk):
    """A ring reduce-scatter that calls `waited` with the handles of each round."""

    def reduce_scatter(tensor):
        rank, n = dist.get_rank(), dist.get_world_size()
        pieces = [tensor[cut] for cut in ring.chunks(tensor.numel(), n)]
        for step in range(n - 1):
            outgoing, home = pieces[(rank - step - 1) % n], pieces[(rank - step - 2) % n]
            landing = torch.zeros_like(home)
            there, origin = (rank + 1) % n, (rank - 1) % n
            pair = [dist.P2POp(dist.isend, outgoing, there), dist.P2POp(dist.irecv, landing, origin)]
            waited(dist.batch_isend_irecv(pair))
            home += landing
        return made(pieces[rank])

    return reduce_scatter


def everyone_to_everyone(waited, buffers):
    """The mean of what all ranks sent; the receives go into the tensors that `buffers` makes."""

    def average(own):
        rank, n = dist.get_rank(), dist.get_world_size()
        others = [peer for peer in range(n) if peer != rank]
        landing = buffers(own, len(others))
        works = [dist.isend(own, peer) for peer in others]
        works += [dist.irecv(each, peer) for each, peer in zip(landing, others, strict=True)]
        waited(works)
        return (own + sum(landing)) / n

    return average


def wait_for_all(works):
    for work in works:
        work.wait()


def one_each(own, count):
    return [torch.zeros_like(own) for _ in range(count)]


def one_for_all(own, count):
    return [torch.zeros_like(own)] * count


def one_length_for_all(tensor):
    """Where chunks differ, a buffer of the longest is longer than a message. NCCL would not let it pass."""
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = [tensor[cut] for cut in ring.chunks(tensor.numel(), n)]
    landing = torch.empty_like(pieces[0])
    for step in range(n - 1):
        outgoing, home = pieces[(rank - step - 1) % n], pieces[(rank - step - 2) % n]
        there, origin = (rank + 1) % n, (rank - 1) % n
        pair = [dist.P2POp(dist.isend, outgoing, there), dist.P2POp(dist.irecv, landing, origin)]
        wait_for_all(dist.batch_isend_irecv(pair))
        home += landing[: home.numel()]
    return pieces[rank]


def kept_in_one_tensor(own):
    """Blocking receives into one tensor, which a list then holds several times."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.send(own, 0)
        dist.recv(own, 0)
        return own
    landing, arrived = torch.empty_like(own), [own]
    for peer in range(1, n):
        dist.recv(landing, peer)
        arrived.append(landing)
    mean = torch.stack(arrived).mean(dim=0)
    for peer in range(1, n):
        dist.send(mean, peer)
    return mean


def reduced_later(parameters, count):
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    flat = torch.cat([p.grad.flatten() * count for p in parameters] + [torch.tensor([float(count)])])
    dist.all_reduce(flat, async_op=True)
    for parameter, piece in zip(parameters, flat[:-1].split([p.numel() for p in parameters]), strict=True):
        parameter.grad.copy_((piece / flat[-1]).view_as(parameter))


def into_its_own(own):
    """What arrives overwrites what is still being sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    messages = [
        dist.P2POp(dist.isend, own, (rank + 1) % size),
        dist.P2POp(dist.irecv, own, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return own


WAITS = [
    wait_for_all,
    lambda works: [work.wait() for work in works],
    lambda works: list(map(methodcaller("wait"), reversed(works))),
]


@pytest.mark.parametrize("waited", WAITS)
def test_however_an_answer_waits_it_has_waited(waited):
    assert check_average.diagnose(everyone_to_everyone(waited, one_each)) is None


WRONG = [
    (check_reduce_scatter, ring_that_waits_for(lambda works: None), "4 messages and waited for none of them"),
    (check_reduce_scatter, ring_that_waits_for(lambda works: works[0].wait()), "4 messages and waited for 2"),
    (
        check_reduce_scatter,
        ring_that_waits_for(lambda works: works[1].wait()),
        "of them: until wait() has returned",
    ),
    (check_average, everyone_to_everyone(lambda works: None, one_each), "and waited for none of them"),
    (check_average, everyone_to_everyone(wait_for_all, one_for_all), "starts a second receive into a tensor"),
    (check_shift, into_its_own, "receives into the tensor that it is sending, so what arrives overwrites it"),
    (check_reduce_scatter, one_length_for_all, "rank 1 receives them into a tensor of 251 elements"),
    (check_average, kept_in_one_tensor, "all messages seem to have arrived in one tensor"),
    (check_average_gradients, reduced_later, "started a message and did not wait for it"),
]


@pytest.mark.parametrize(("check", "answer", "diagnosis"), WRONG)
def test_a_message_that_was_not_waited_for_is_named(check, answer, diagnosis, monkeypatch):
    monkeypatch.setattr(attempts, "SECONDS", 2.5)
    said = check.diagnose(answer)
    assert diagnosis in said and "Message(" not in said


@pytest.mark.parametrize(
    ("made", "diagnosis"),
    [
        (torch.Tensor.tolist, "it returned list, with the right numbers in it: return the tensor itself"),
        (list, "it returned list, with the right numbers in it"),
        (torch.Tensor.numpy, "it returned ndarray, with the right numbers in it"),
        (lambda chunk: (chunk,), "return the tensor itself, without a comma after it"),
        (lambda chunk: (2 * chunk).tolist(), "where a tensor of shape (333,) is right"),
    ],
)
def test_the_right_numbers_in_another_type_are_told_apart_from_wrong_ones(made, diagnosis):
    assert diagnosis in check_reduce_scatter.diagnose(ring_that_waits_for(wait_for_all, made))


def test_a_process_that_a_signal_ended_has_a_reason():
    def dies():
        os.kill(os.getpid(), signal.SIGSEGV)

    said = attempt(dies, [()]).failure
    assert "was killed by signal SIGSEGV: it read or wrote memory that does not belong to it" in said


def test_the_methods_of_a_handle_are_as_before_after_a_look():
    before = dist.Work.wait
    with Wire():
        assert dist.Work.wait is not before
    assert dist.Work.wait is before
