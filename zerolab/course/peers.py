"""Read from whom to whom the messages of all ranks go: to a rank that does not exist, or past each other."""

from collections.abc import Mapping
from itertools import combinations

from zerolab.course.messages import Calls, Message, at


def to_nobody(calls: Calls) -> str | None:
    """Return the first message to or from a rank that does not exist, and what the others tell of it."""
    for rank, own in enumerate(calls):
        for call in own:
            if call.peer is not None and call.peer not in range(len(calls)):
                what = "receives from" if call.received else "sends to"
                return (
                    f"rank {rank} {what} rank {call.peer}, and the ranks are 0 to {len(calls) - 1}"
                    f"{at(call.place)}{_why_nobody(calls, rank, call)}"
                )
    return None


def _why_nobody(calls: Calls, rank: int, wrong: Message) -> str:
    """Whether the ranks lack a modulo, or are taken in pairs. One rank's call alone does not tell."""
    n, far = len(calls), (wrong.peer or 0) - rank
    alike = [
        (each, call.peer)
        for each, own in enumerate(calls)
        for call in own
        if call.peer is not None and call.received == wrong.received
    ]
    others = [each for each in range(n) if each != rank]
    pairs = [(a, b) for a, b in combinations(others, 2) if _address_each_other(calls, a, b)]
    to = f"(rank {'+' if far > 0 else '-'} {abs(far)}) % world_size"
    if number := _fixed_number(calls):
        return (
            f". The ranks are counted modulo {number}, or it looks so. Count modulo world_size, which is {n}"
        )
    if far % n and all((peer - each) % n == far % n for each, peer in alike):
        alone = len({each for each, _ in alike}) == 1
        pair = ". If ranks are taken in pairs here, this one has no partner" if alone else ""
        return f": count modulo the number of ranks, {to}{pair}"
    if pairs:
        a, b = pairs[0]
        return (
            f". Ranks {a} and {b} exchange messages as a pair, and with {n} ranks rank {rank} has no such "
            "partner: find peers for any number of ranks, such as (rank + 1) % world_size"
        )
    if distances := _powers_of_two(calls):
        which = " and ".join(f"rank ^ {distance}" for distance in distances)
        return (
            f". Ranks exchange messages as a pair, with {which}, and with {n} ranks rank {rank} has no such "
            "partner: that is right for a power of two only. Find peers for any number of ranks"
        )
    return ""


def _fixed_number(calls: Calls) -> int | None:
    """Return the size of the larger ring whose neighbours all ranks address, if they do."""
    peers = [
        (rank, call.peer, -1 if call.received else 1)
        for rank, own in enumerate(calls)
        for call in own
        if call.peer is not None
    ]
    number = max((peer + 1 for rank, peer, _ in peers if rank == 0), default=0)  # of rank 0's last neighbour
    if number <= len(calls) or not all(peer in range(number) for _, peer, _ in peers):
        return None
    ways = {(peer - rank) * sign % number for rank, peer, sign in peers}
    is_ring = len(ways) == 1 and ways <= {1, number - 1} and len({rank for rank, _, _ in peers}) > 1
    return number if is_ring else None


def _powers_of_two(calls: Calls) -> list[int]:
    """Return the distances d of an exchange with rank ^ d: all are powers of two, and a rank has answered."""
    pairs = {(rank, call.peer) for rank, own in enumerate(calls) for call in own if call.peer is not None}
    distances = sorted({rank ^ peer for rank, peer in pairs if peer >= 0})
    answered = any((peer, rank) in pairs for rank, peer in pairs)
    return distances if answered and all(each.bit_count() == 1 for each in distances) else []


def _address_each_other(calls: Calls, a: int, b: int) -> bool:
    """Whether two ranks address each other and nobody else."""
    return {call.peer for call in calls[a]} == {b} and {call.peer for call in calls[b]} == {a}


def ways_that_do_not_meet(calls: Calls) -> str | None:
    """Whether all ranks send by one rule, and receive by one that is not its opposite."""
    return _another_modulo(calls) or _distances_that_do_not_meet(calls)


def _another_modulo(calls: Calls) -> str | None:
    """Whether the peers are those of a ring that is one rank too short."""
    n, short = len(calls), len(calls) - 1
    to, origin = _peers(calls, received=False), _peers(calls, received=True)
    by_rule = lambda ring: all(
        peers == {(rank + way) % ring}
        for by_rank, way in ((to, 1), (origin, -1))
        for rank, peers in by_rank.items()
    )
    if n < 3 or len(to.keys() | origin.keys()) < n or by_rule(n) or not by_rule(short):
        return None
    whom = ", ".join(
        f"rank {rank} {'sends to' if rank in to else 'receives from'} rank {min(peers)}"
        for rank, peers in sorted((origin | to).items())
    )
    first = next(call for own in calls for call in own if call.peer is not None)
    return (
        f"the ranks are counted modulo {short}, or it looks so: {whom}. Nobody sends to rank {short}. Count "
        f"modulo world_size, which is {n}{at(first.place)}"
    )


def _peers(calls: Calls, received: bool) -> dict[int, set[int]]:
    """By rank, to whom it sends, or from whom it receives; ranks that do neither are left out."""
    by_rank = {
        rank: {call.peer for call in own if call.peer is not None and call.received == received}
        for rank, own in enumerate(calls)
    }
    return {rank: peers for rank, peers in by_rank.items() if peers}


def _distances_that_do_not_meet(calls: Calls) -> str | None:
    n, to, origin = len(calls), _peers(calls, received=False), _peers(calls, received=True)
    if len(to.keys() | origin.keys()) < n:  # by the call that it waits in, each rank shows half of its rule
        return None
    ahead, behind = _distances(to, n), _distances(origin, n)
    if not len(ahead) == len(behind) == 1 or 0 in ahead | behind or not (min(ahead) + min(behind)) % n:
        return None
    name = lambda distance: f"(rank {'+' if 2 * distance <= n else '-'} {min(distance, n - distance)}) % {n}"
    first = next(call for own in calls for call in own if call.received)
    return (
        f"each rank sends to {name(min(ahead))} and receives from {name(min(behind))}, so nobody receives "
        f"what is sent. What goes to {name(min(ahead))} comes from {name(n - min(ahead))}{at(first.place)}"
    )


def _distances(by_rank: Mapping[int, set[int]], n: int) -> set[int]:
    return {(peer - rank) % n for rank, peers in by_rank.items() for peer in peers}
