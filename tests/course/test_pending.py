"""Promise: a tensor that is used while its message is under way is named, with its line; others are not."""

import pytest
import torch
import torch.distributed as dist
from support.lessons import solutions_travel_by_value

from zerolab.course import attempts
from zerolab.course.attempts import attempt
from zerolab.course.handles import used_early
from zerolab.course.lessons.ranks import check_average

solutions_travel_by_value(__name__)


def started():
    """A receive from the other rank and a send to it: the handles, and the two tensors."""
    rank = dist.get_rank()
    sent, landing = torch.full((4,), float(rank)), torch.zeros(4)
    return [dist.irecv(landing, 1 - rank), dist.isend(sent, 1 - rank)], sent, landing


def wait_for(works):
    for work in works:
        work.wait()


def read(works, sent, landing):
    total = sent + landing
    wait_for(works)
    return total


def passed_on(works, sent, landing):
    more = dist.isend(landing[:2], 1 - dist.get_rank())
    dist.recv(torch.zeros(2), 1 - dist.get_rank())
    wait_for([*works, more])


def overwritten(works, sent, landing):
    sent.mul_(2)
    wait_for(works)


def reduced():
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    double = tensor * 2
    work.wait()
    return double


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (read, "rank 0 uses a tensor before its message has arrived"),
        (passed_on, "rank 0 uses a tensor before its message has arrived"),
        (overwritten, "rank 0 changes a tensor while it is being sent"),
    ],
)
def test_a_tensor_that_is_used_while_its_message_is_under_way_is_named(use, says):
    outcome = attempt(lambda: use(*started()), [()] * 2)
    assert says in used_early(outcome.calls) and f" of {use.__name__}: `" in used_early(outcome.calls)


def test_the_tensor_of_a_collective_is_under_way_too():
    said = used_early(attempt(reduced, [()] * 2).calls)
    assert "rank 0 uses a tensor before dist.all_reduce has ended" in said and "of reduced: `double" in said


def others_are_used():
    works, sent, landing = started()
    shape = torch.empty_like(landing), landing[:2], landing.new_zeros(3), landing.shape
    doubled = sent * 2, torch.ones(4).mul_(3)
    wait_for(works)
    return landing + doubled[0] + len(shape)


def one_wait_of_two():
    works, _, landing = started()
    works[0].wait()
    total = landing.sum()
    works[1].wait()
    return total


def another_half():
    rank, tensor = dist.get_rank(), torch.ones(8)
    works = [dist.irecv(tensor[:4], 1 - rank), dist.isend(tensor[4:], 1 - rank)]
    used = tensor[4:] + 1
    wait_for(works)
    return used


@pytest.mark.parametrize("right", [others_are_used, one_wait_of_two, another_half])
def test_what_is_not_under_way_may_be_used(right):
    assert used_early(attempt(right, [()] * 2).calls) is None


def added_before_the_wait(own):
    rank, others = dist.get_rank(), range(1, dist.get_world_size())
    if rank > 0:
        dist.send(own, 0)
        dist.recv(own, 0)
        return own
    buffers = [torch.zeros_like(own) for _ in others]
    works = [dist.irecv(each, peer) for each, peer in zip(buffers, others, strict=True)]
    mean = (own + sum(buffers)) / len([own, *others])
    wait_for(works)
    for peer in others:
        dist.send(mean, peer)
    return mean


def never_waited(own):
    """Without their handles the receives end, and the others wait for ever in their sends."""
    rank, others = dist.get_rank(), range(1, dist.get_world_size())
    if rank > 0:
        dist.send(own, 0)
        dist.recv(own, 0)
        return own
    buffers = [torch.zeros_like(own) for _ in others]
    for each, peer in zip(buffers, others, strict=True):
        dist.irecv(each, peer)
    mean = (own + sum(buffers)) / len([own, *others])
    for peer in others:
        dist.send(mean, peer)
    return mean


@pytest.mark.parametrize("answer", [added_before_the_wait, never_waited])
def test_a_check_names_a_buffer_that_was_added_too_early(answer, monkeypatch):
    monkeypatch.setattr(attempts, "SECONDS", 2.5)
    said = check_average.diagnose(answer)
    used = "rank 0 uses a tensor before its message has arrived" in said and "`mean = (own + sum(" in said
    waited_for_none = "rank 0 started 2 messages and waited for none of them" in said
    # Which of the two is seen first depends on how fast the other ranks are.
    assert used or (answer is never_waited and waited_for_none)
