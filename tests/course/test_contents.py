"""Promise: the numbers in a message tell whose they are, and how far they came."""

import pytest
import torch

from zerolab.course.contents import how_far, odd_contents, whose
from zerolab.course.messages import Message

NUMBERS = [torch.randn(20, generator=torch.Generator().manual_seed(rank)).double() for rank in range(3)]
FIRST, SECOND, THIRD = NUMBERS


def sent(peer, tensor):
    return Message("send", peer, tensor.numel(), tensor.nbytes, content=tuple(tensor.tolist()))


def received(peer):
    return Message("recv_", peer, 20, 160)


def test_the_ranks_behind_a_message_are_found():
    assert whose(sent(0, SECOND), NUMBERS) == pytest.approx({1: 1})
    assert whose(sent(0, FIRST - THIRD / 2), NUMBERS) == pytest.approx({0: 1, 2: -0.5})
    for other in (torch.zeros(20), SECOND.abs(), SECOND[:5], SECOND * float("nan")):
        assert whose(sent(0, other.double()), NUMBERS) == {}
    assert whose(received(0), NUMBERS) == {}


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ((FIRST, torch.zeros(20), THIRD), "rank 1 sends zeros"),
        (
            (torch.zeros(20), torch.ones(20), THIRD),
            "rank 1 sends a tensor whose elements are all 1, which is its",
        ),
        ((torch.full((20,), 7.0), SECOND, THIRD), "rank 0 sends a tensor whose elements are all 7"),
        ((FIRST, SECOND, THIRD / 0), "rank 2 sends nan or inf"),
        ((FIRST, SECOND.abs(), THIRD + FIRST), None),
        ((torch.zeros(1), SECOND, THIRD), None),
    ],
)
def test_what_is_nobodys_is_named(tensors, says):
    said = odd_contents([[sent((rank + 1) % 3, each)] for rank, each in enumerate(tensors)], NUMBERS)
    assert (said is None) if says is None else says in said


def went(calls, rank=0, missing=2):
    names = [f"rank {peer}'s gradient" for peer in range(3)]
    have = {name: float(peer != missing) for peer, name in enumerate(names)}
    return how_far(calls, NUMBERS, rank)(have, dict.fromkeys(names, 1.0))


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ([[received(1)], [sent(0, SECOND)], []], "rank 2 sends nothing"),
        ([[received(2)], [], [sent(0, FIRST)]], "rank 2's own numbers are in nothing that it sends"),
        (
            [[received(2)], [], [sent(0, THIRD)]],
            "numbers arrive there in a message of rank 2, and are not in",
        ),
        ([[received(1)], [sent(0, SECOND), received(2)], [sent(1, THIRD)]], "rank 1 sends to rank 0 before"),
        ([[], [received(2)], [sent(1, THIRD)]], "numbers arrive at rank 1, and nobody sends them on"),
    ],
)
def test_the_way_of_missing_numbers_is_told(calls, says):
    assert says in went(calls)


def test_a_rank_that_leaves_out_its_own_is_named_where_it_adds_up():
    calls = [[received(1), received(2)], [sent(0, SECOND)], [sent(0, THIRD)]]
    assert went(calls, 0, 0) == "rank 0 adds up what arrives, without its own numbers"
    assert went(calls, 1, 1) is None
