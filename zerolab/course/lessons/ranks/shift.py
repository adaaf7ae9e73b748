"""Lesson 00's second exercise: every rank passes its tensor to the right, and no rank waits for ever."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from zerolab.course.attempts import Attempt, attempt
from zerolab.course.contents import how_far, odd_contents, whose
from zerolab.course.contributions import by_messages
from zerolab.course.evidence import Finding, examine, sum_of
from zerolab.course.exercise import graded
from zerolab.course.lessons.ranks.check import call_with, gradient
from zerolab.course.lessons.ranks.solution import shift
from zerolab.course.messages import Calls
from zerolab.course.targets import bronze

CASES = (3, 2, 4)  # ranks
HINTS = (
    "if all ranks send first, each waits for a receive that never begins. At least one rank has to receive "
    "first. What may the rank that sent to it do after that?",
    "let rank 0 send first and receive second, and all others receive first and send second. Or let the even "
    "ranks send first.",
    "a receive needs a tensor of its own, torch.empty_like(own): what arrives must not overwrite what is "
    "still to be sent. The ranks are (rank + 1) % world_size and (rank - 1) % world_size.",
)

RIGHT_NEIGHBOUR = "it returned its right neighbour's tensor: send to rank + 1, and receive from rank - 1"
TOO_MANY_ROUNDS = "each tensor was passed on N-1 times, so it is at its left neighbour now: pass it on once"

# A sentence, and what it leads to: `own` holds the ranks' tensors.
# fmt: off
MISTAKES: dict[str, Callable[[list[torch.Tensor], int], torch.Tensor]] = {
    "it returned its own tensor: return the one that arrived":
        lambda own, rank: own[rank],
    RIGHT_NEIGHBOUR:
        lambda own, rank: own[(rank + 1) % len(own)],
    "the tensors end at the last rank, and rank 0 gets none: after the last rank comes rank 0, "
    "(rank + 1) % world_size":
        lambda own, rank: own[max(0, rank - 1)],
    "neighbours swapped in pairs, 0 with 1 and 2 with 3: each rank sends to the next one and gets that of "
    "the one before":
        lambda own, rank: own[rank ^ 1] if rank ^ 1 < len(own) else own[rank],
    "the ranks swapped from both ends: each rank gets the tensor of the one before it":
        lambda own, rank: own[-1 - rank],
    "what arrived was added to its own tensor: return what arrived alone":
        lambda own, rank: own[rank] + own[rank - 1],
    "what arrived was averaged with its own tensor: return what arrived alone":
        lambda own, rank: (own[rank] + own[rank - 1]) / 2,
    "that is the tensor from two ranks before: one round is enough":
        lambda own, rank: own[rank - 2],
    "that is the sum of all: only one tensor has to arrive":
        lambda own, rank: sum_of(own),
    "the tensors of all ranks were stacked: return that of rank - 1":
        lambda own, rank: torch.stack(own),
}
# fmt: on


@graded(
    "Silver: on 2, 3 and 4 ranks each has its left neighbour's tensor, no rank waits for ever, and each "
    "sends one message.",
    call="shift(own)",
    hints=HINTS,
    solution=[shift],
)
def check_shift(fn: Callable) -> str | None:
    """Run fn(tensor) on 3, 2 and 4 ranks: each must return the tensor of the rank before it.

    Bronze for right values, silver if each rank sends its tensor once.
    """
    return examine(CASES, partial(_look, fn))


def _look(fn: Callable, world_size: int) -> Finding:
    own = [gradient(rank) for rank in range(world_size)]
    outcome = attempt(call_with, [(fn, rank) for rank in range(world_size)])
    mistakes, sent = dict(MISTAKES), {len(own) for own in outcome.messages}
    mistakes[_one_tensor_everywhere(outcome, own, 0)] = lambda own, rank: own[0]
    mistakes[_one_tensor_everywhere(outcome, own, -1)] = lambda own, rank: own[-1]
    if sent == {world_size - 1}:  # with two ranks this is right
        mistakes[TOO_MANY_ROUNDS] = mistakes[RIGHT_NEIGHBOUR]
    if sent == {world_size - 1} and world_size > 2:
        del mistakes[RIGHT_NEIGHBOUR]
    return Finding(
        f"{world_size} ranks",
        outcome.unusable("dist.send and dist.recv"),
        outcome.values,
        [own[rank - 1] for rank in range(world_size)],
        {why: [value(own, rank) for rank in range(world_size)] for why, value in mistakes.items()},
        lambda rank: [{f"rank {peer}'s tensor": each for peer, each in enumerate(own)}],
        cost=None if outcome.failure else _too_much_sent(outcome),
        also=odd_contents(outcome.calls, own),
        reason=_receives_nothing(outcome.calls),
        explain=partial(by_messages, outcome.calls),
        went=partial(how_far, outcome.calls, own),
    )


def _one_tensor_everywhere(outcome: Attempt, own: Sequence[torch.Tensor], place: int) -> str:
    """The mistake behind one rank's tensor on all ranks. The messages tell whether it was passed on."""
    origin, name = place % len(own), "rank 0" if place == 0 else "the last rank"
    others = [sent for rank, sent in enumerate(outcome.messages) if rank != origin]
    said = f"every rank returned {name}'s tensor"
    if outcome.messages and outcome.messages[origin] and not any(others):
        return f"{said}, and no other rank sent any: each rank has to send its own to the next one"
    if any([*whose(call, own)] == [origin] for sent in others for call in sent):
        return (
            f"{said}: pass on your own tensor, not the one that has just arrived. Each receive needs a "
            "tensor of its own"
        )
    return f"{said}: return the tensor of rank - 1"


def _receives_nothing(calls: Calls) -> str | None:
    """A rank without a receive, where others have one."""
    receives = [any(call.received for call in own) for own in calls]
    if all(receives) or not any(receives):
        return None
    rank = receives.index(False)
    left = (rank - 1) % len(calls)
    return f"rank {rank} receives nothing: let it receive from (rank - 1) % world_size, which is rank {left}"


def _too_much_sent(outcome: Attempt) -> str | None:
    """More than one message from a rank, whatever their sizes."""
    for rank, sent in enumerate(outcome.messages):
        if len(sent) > 1:
            peers = sorted({message.peer for message in sent if message.peer is not None})
            to = f"rank{'s' * (len(peers) > 1)} {' and '.join(map(str, peers))}"
            return bronze(
                f"rank {rank} sends {len(sent)} messages to {to}, and one is enough: send the whole tensor "
                "to the next rank"
            )
    return None
