"""Find out why a rank of an all-reduce lacks a chunk of the sum: who has it, who sends it, where it is put.

The messages tell which complete chunks went to whom. What a rank ended with tells where it put them.
"""

from collections.abc import Mapping, Sequence

import torch

from zerolab.course.attempts import Odd
from zerolab.course.evidence import same
from zerolab.course.lessons.collectives.decoded import Sent, Traffic
from zerolab.course.lessons.collectives.first_half import cause
from zerolab.course.messages import at

_ANOTHER = (
    "a clone, or `piece + buffer`, is another tensor: write into `tensor`, or return the tensor with the sums"
)
Values = Mapping[int, torch.Tensor]
"""By rank, what it ended with, if that is a tensor of the right shape."""


def why_incomplete(
    traffic: Traffic, ended: Sequence[torch.Tensor | Odd], right: torch.Tensor, silent: Sequence[bool]
) -> str | None:
    """Say why a rank lacks a chunk of the sum. `silent`: which ranks returned nothing."""
    values = {
        rank: value
        for rank, value in enumerate(ended)
        if not isinstance(value, Odd) and value.shape == right.shape
    }
    found = _of_all_ranks(traffic)
    wrong = [
        (number, rank)
        for number, cut in enumerate(traffic.cuts)
        for rank, value in values.items()
        if not same(value[cut], right[cut])
    ]
    reasons = (_of_one_rank(traffic, values, right, rank, number) for number, rank in wrong)
    found = found or next(filter(None, reasons), None)
    untouched = [rank for rank, value in values.items() if torch.equal(value, traffic.brought[rank])]
    returned = next((_returned_nothing(rank, silent) for rank in untouched if silent[rank]), None)
    return ". ".join(filter(None, [found, returned])) or None


def _of_all_ranks(traffic: Traffic) -> str | None:
    """What is wrong with the messages, whatever the ranks made of them."""
    return cause(traffic, [None] * len(traffic.calls)) or _cut_short(traffic) or _incomplete_begin(traffic)


def _of_one_rank(traffic: Traffic, ended: Values, right: torch.Tensor, rank: int, number: int) -> str | None:
    """Why a rank lacks a chunk: by the messages that hold the complete chunk."""
    cut, n = traffic.cuts[number], len(traffic.calls)
    complete = [each for each in traffic.everything() if each.complete(n) and each.covers(cut)]
    if arrived := [each for each in complete if each.receiver == rank]:
        said = f"the complete chunk {number} arrives at rank {rank} in a message of rank {arrived[0].sender}"
        place = _stands_at(ended[rank], right[cut], cut.start)
        if place is None:
            return f"{said}, and is not in its result. {_ANOTHER}"
        return f"{said}, and was put at element {place}. It begins at element {cut.start} of the tensor"
    has = [peer for peer, value in ended.items() if same(value[cut], right[cut])]
    holders = [each.sender for each in complete] + has
    if not holders or rank in holders:
        return None
    to = sorted({each.receiver for each in complete if each.receiver is not None})
    whom = f"{' and '.join(f'rank {peer}' for peer in to)} alone" if to else "nobody"
    return (
        f"rank {holders[0]} has the complete chunk {number}. It is sent to {whom}, so it never comes to rank "
        f"{rank}"
    )


def _stands_at(value: torch.Tensor, chunk: torch.Tensor, home: int) -> int | None:
    """At which other element of a value a chunk begins."""
    if len(chunk) < 2:
        return None
    off = (value.unfold(0, len(chunk), 1) - chunk).abs().amax(dim=1)
    places = [int(place) for place in (off < 1e-6).nonzero().flatten() if int(place) != home]
    return places[0] if places else None


def _cut_short(traffic: Traffic) -> str | None:
    """Whether all messages of the second half have numel // N elements, where chunks have one more."""
    n, numel = len(traffic.calls), traffic.cuts[-1].stop
    second = [each.message for own in traffic.sent for each in own[n - 1 :]]
    if not second or not numel % n or any(message.numel != numel // n for message in second):
        return None
    return (
        f"in the second half each message has {numel // n} elements, which is numel // N, and chunk 0 has "
        f"{traffic.cuts[0].stop}: cut both halves with ring.chunks{at(second[0].place)}"
    )


def _incomplete_begin(traffic: Traffic) -> str | None:
    """Whether the ranks begin the second half with a chunk that is not complete."""
    n = len(traffic.calls)
    if not traffic.is_ring or any(len(own) < n for own in traffic.sent):
        return None
    first = [own[n - 1] for own in traffic.sent]
    if any(each.complete(n) or traffic.number(each) is None for each in first):
        return None
    begins = f"in round {n}, the first of the second half, rank 0 sends {traffic.chunk(first[0])}"
    return f"{begins}, which is not complete{_completed(traffic)}{at(first[0].message.place)}"


def _completed(traffic: Traffic) -> str:
    """The chunk that is complete on rank 0 after the first half."""
    n = len(traffic.calls)
    arrived: list[Sent] = traffic.arrived[0]
    if len(arrived) < n - 1 or set(arrived[n - 2].factors) | {0} != set(range(n)):
        return ""
    return f": {traffic.chunk(arrived[n - 2])} is complete on rank 0 then, so send that one"


def _returned_nothing(rank: int, silent: Sequence[bool]) -> str:
    """What counts of a rank that returned nothing, and left its tensor as it was."""
    if all(silent):
        return f"the function returned None, so what is in `tensor` counts. {_ANOTHER}"
    return f"rank {rank} returned None, so what is in its `tensor` counts: return the sum on every rank"
