"""Find the round of a ring's reduce-scatter in which a rank sends something else than it should.

Each rank sends a chunk of its own first. From then on it sends the chunk that has just arrived, with its own
numbers added once. The first message that is something else tells the mistake, whatever follows from it.
"""

from collections.abc import Mapping, Sequence

import torch

from zerolab.course.lessons.collectives.decoded import Sent, Traffic
from zerolab.course.messages import at


def cause(traffic: Traffic, left: Sequence[torch.Tensor | None]) -> str | None:
    """Return what is wrong with the messages of the first half. `left`: the ranks' tensors at the end."""
    if not traffic.is_ring or traffic.of_whole_tensors:
        return None
    rounds = len(traffic.calls) - 1
    for turn in range(min(rounds, max(map(len, traffic.sent)))):
        for rank, own in enumerate(traffic.sent):
            if turn < len(own) and (told := _wrong(traffic, rank, turn, left[rank])):
                return f"{told}{at(own[turn].message.place)}"
    return _too_early_or_late(traffic)


def added_elsewhere(
    traffic: Traffic, seen: Sequence[object], left: Sequence[torch.Tensor | None]
) -> str | None:
    """Whether each rank received its own chunk last, and returned what it had before. `seen`: the results."""
    n = len(traffic.calls)
    for rank, own in enumerate(traffic.arrived):
        if len(own) != n - 1 or traffic.number(own[-1]) != rank or not own[-1].factors:
            return None
        before, after, got = traffic.brought[rank], left[rank], seen[rank]
        if after is None or not torch.equal(after, before) or not isinstance(got, torch.Tensor):
            return None
        if not torch.equal(got, before[traffic.cuts[rank]]):
            return None
    return (
        "every rank receives its own chunk in the last round, and the tensor has not changed: `piece + "
        "buffer` makes another one. Return that sum, or write it into the slice with `piece += buffer`"
    )


def _wrong(traffic: Traffic, rank: int, turn: int, left: torch.Tensor | None) -> str | None:
    """What is wrong with one message, compared with what had arrived before."""
    each, which = traffic.sent[rank][turn], f"in round {turn + 1} rank {rank} sends"
    if each.zeros:
        return f"{which} zeros: begin with a chunk of the tensor"
    if not each.factors:
        if chunks := traffic.mixed(each):
            both = " and ".join(map(str, chunks))
            return f"{which} a sum of numbers of the chunks {both}: add what arrives to the same chunk"
        return None
    if turn == 0:
        return _wrong_begin(each, which)
    if turn > len(traffic.arrived[rank]):
        return None
    before = traffic.arrived[rank][turn - 1]
    name = traffic.chunk(each)
    if (each.start, each.stop) != (before.start, before.stop):
        return (
            f"{which} {name}, and {traffic.chunk(before)} arrived in the round before: the chunk that has "
            "arrived is the next one to send"
        )
    return _wrong_sum(each, before, f"{which} {name}", left, traffic)


def _wrong_begin(each: Sent, which: str) -> str | None:
    """The first message is the rank's own numbers, once."""
    own = each.factors.get(each.sender, 0)
    if list(each.factors) != [each.sender]:
        others = ", ".join(f"rank {other}" for other in each.factors if other != each.sender)
        return f"{which} numbers of {others}: its first message has its own numbers alone"
    if abs(own - 1) < 1e-3:
        return None
    return f"{which} its own numbers {own:.4g} times: send them as they are"


def _wrong_sum(
    each: Sent, before: Sent, which: str, left: torch.Tensor | None, traffic: Traffic
) -> str | None:
    """A chunk that is sent on is what arrived, and the rank's own numbers once."""
    rank, arrived = each.sender, before.factors
    wanted = {**arrived, rank: arrived.get(rank, 0) + 1}
    if not arrived or _alike(each.factors, wanted):
        return None
    if _alike(each.factors, arrived):
        return f"{which} as it arrived, without the numbers of rank {rank}: add them"
    if list(each.factors) == [rank]:
        return (
            f"{which} without what arrived in the round before{_where_it_went(before, rank, left, traffic)}"
        )
    times = [
        f"rank {peer}'s numbers {each.factors.get(peer, 0):.4g} times"
        for peer in sorted(wanted)
        if abs(each.factors.get(peer, 0) - wanted[peer]) >= 1e-3
    ]
    return f"{which} with {' and '.join(times)}: what arrived counts once, and its own numbers count once"


def _alike(one: Mapping[int, float], other: Mapping[int, float]) -> bool:
    return one.keys() == other.keys() and all(abs(one[rank] - other[rank]) < 1e-3 for rank in one)


def _where_it_went(before: Sent, rank: int, left: torch.Tensor | None, traffic: Traffic) -> str:
    """Where a rank has put what arrived: nowhere, or in another chunk."""
    if left is None:
        return ""
    if torch.equal(left, traffic.brought[rank]):
        return (
            ". Nothing was added to the tensor itself: `piece + buffer` makes another tensor, and "
            "`piece += buffer` writes into the slice"
        )
    arrived = torch.tensor(before.message.content or (), dtype=torch.float64)
    for number, cut in enumerate(traffic.cuts):
        length = min(len(arrived), cut.stop - cut.start)
        here = slice(cut.start, cut.start + length)
        more = left[here].double() - traffic.brought[rank][here].double()
        if (cut.start, cut.stop) != (before.start, before.stop) and torch.allclose(more, arrived[:length]):
            return f". What arrived was added to chunk {number}, and it belongs to {traffic.chunk(before)}"
    return ""


def _too_early_or_late(traffic: Traffic) -> str | None:
    """Whether the chunk that is complete after the last round is not the rank's own."""
    n = len(traffic.calls)
    for rank, own in enumerate(traffic.arrived):
        if len(own) < n - 1 or not (last := own[n - 2]).factors:
            return None
        number = traffic.number(last)
        if number is None or number == rank or set(last.factors) | {rank} != set(range(n)):
            return None
    way = "-" if (traffic.sent[0][0].receiver or 0) == 1 else "+"
    complete = traffic.chunk(traffic.arrived[0][n - 2])
    return (
        f"after the last round the sum of {complete} is complete on rank 0, whose own is chunk 0: rank r has "
        f"to send chunk r {way} 1 first"
    )
