"""Lesson 10's exercise: models whose matrices get owners, and the owners that common mistakes give them."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from zerolab.course.lessons.whole_matrices.solution import owners

Plan = list[int]  # the owner of each matrix


class Case(NamedTuple):
    """What the update of each matrix takes, and the number of ranks."""

    work: tuple[int, ...]
    world_size: int

    def loads(self, plan: Iterable[int]) -> list[int]:
        """What each rank has to do."""
        loads = [0] * self.world_size
        for work, owner in zip(self.work, plan, strict=True):
            loads[owner] += work
        return loads

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.work[:8]))
        more = f", ... {len(self.work)} matrices" if len(self.work) > 8 else ""
        return f"work [{shown}{more}], {self.world_size} ranks"


_BLOCK = (3, 1, 4, 4)  # of a GPT, in units of h³: qkv, projection, and the two of the MLP
CASES = (
    Case(_BLOCK, 2),
    Case(_BLOCK * 3, 4),
    Case((1, 2, 3, 4, 5, 6, 7, 8, 9), 3),
    Case(_BLOCK * 12, 8),
    Case((2, 2, 2, 3, 3), 2),
    Case((6, 1, 1, 1, 1, 1, 1), 2),
    Case((5, 3), 4),
    Case((7,) * 10, 3),
    Case((64**3, 128 * 64**2, 64**3, 3 * 64**3, 32**2 * 8), 3),
    Case((4, 4, 3), 1),
    Case((), 2),
)


def _one_after_the_other(order: Callable[[Case], Iterable[int]], choose: Callable) -> Callable[[Case], Plan]:
    """Take the matrices in an order; each goes to the rank that `choose` finds in the loads and counts."""

    def plan(case: Case) -> Plan:
        loads, counts, found = [0] * case.world_size, [0] * case.world_size, [0] * len(case.work)
        for turn, place in enumerate(order(case)):
            found[place] = owner = choose(case, turn, loads, counts)
            loads[owner] += case.work[place]
            counts[owner] += 1
        return found

    return plan


def _as_listed(case: Case) -> Iterable[int]:
    return range(len(case.work))


def _longest_first(case: Case) -> Iterable[int]:
    return sorted(range(len(case.work)), key=lambda place: -case.work[place])


def _shortest_first(case: Case) -> Iterable[int]:
    return sorted(range(len(case.work)), key=lambda place: case.work[place])


def _least(case: Case, turn: int, loads: list[int], counts: list[int]) -> int:
    return loads.index(min(loads))


def _in_turn(case: Case, turn: int, loads: list[int], counts: list[int]) -> int:
    return turn % case.world_size


def _there_and_back(case: Case, turn: int, loads: list[int], counts: list[int]) -> int:
    row, place = divmod(turn, case.world_size)
    return case.world_size - 1 - place if row % 2 else place


def _until_its_share(case: Case, turn: int, loads: list[int], counts: list[int]) -> int:
    """The first rank that has less than the mean: neighbours stay together."""
    mean = sum(case.work) / case.world_size
    return next((rank for rank, load in enumerate(loads) if load < mean), case.world_size - 1)


def _sorted_and_left_so(case: Case) -> Plan:
    """The right owners, in the order of the work and not of the matrices."""
    return owners(sorted(case.work, reverse=True), case.world_size)


def _equal_counts(case: Case) -> Plan:
    size = -(-len(case.work) // case.world_size)
    return [place // size for place in range(len(case.work))]


# A sentence, and the owners that a case then gets.
# fmt: off
MISTAKES: dict[str, Callable[[Case], Plan]] = {
    "every matrix goes to rank 0: give each to the rank that has the least work so far":
        lambda case: [0] * len(case.work),
    "every matrix goes to the last rank: give each to the rank that has the least work so far":
        lambda case: [case.world_size - 1] * len(case.work),
    "the matrices are dealt out in turn, as they stand in the list, whatever their work: give each to the "
    "rank that has the least work so far":
        _one_after_the_other(_as_listed, _in_turn),
    "the matrices are sorted and then dealt out in turn, so that rank 0 has the longest of every round: give "
    "each to the rank that has the least work so far":
        _one_after_the_other(_longest_first, _in_turn),
    "the matrices are dealt out in turn, the shortest first: begin with the longest, and give each to the "
    "rank that has the least work so far":
        _one_after_the_other(_shortest_first, _in_turn),
    "the matrices are sorted and dealt out there and back, which balances pairs and not the sums: give each "
    "to the rank that has the least work so far":
        _one_after_the_other(_longest_first, _there_and_back),
    "each matrix goes to the rank with the least work, in the order of the list. A long one that comes last "
    "then finds every rank busy: begin with the longest":
        _one_after_the_other(_as_listed, _least),
    "the shortest matrices are given out first, so a long one comes last, and one rank works longer for it: "
    "begin with the longest":
        _one_after_the_other(_shortest_first, _least),
    "each matrix goes to the rank with the fewest matrices: count their work and not the matrices":
        _one_after_the_other(_as_listed, lambda case, turn, loads, counts: counts.index(min(counts))),
    "the longest go first, but to the rank with the fewest matrices: count their work and not the matrices":
        _one_after_the_other(_longest_first, lambda case, turn, loads, counts: counts.index(min(counts))),
    "each matrix goes to the rank that has the most work so far: take the one that has the least":
        _one_after_the_other(_longest_first, lambda case, turn, loads, counts: loads.index(max(loads))),
    "neighbours stay together, and a rank takes matrices until it has its share: give them out in another "
    "order, the longest first":
        _one_after_the_other(_as_listed, _until_its_share),
    "each rank gets as many neighbours in the list as every other: count their work and not the matrices":
        _equal_counts,
    "the owners stand in the order of the sorted work: put each at the place of its matrix in the list":
        _sorted_and_left_so,
}
# fmt: on
