"""Lesson 10's exercise: the ways to choose a rank for the next matrix, the right one and others."""

from collections.abc import Callable
from functools import partial
from itertools import product
from math import sqrt
from typing import NamedTuple

from zerolab.course.lessons.whole_matrices.cases import Case


class Ranks:
    """What the ranks have so far: of each its matrices, and what a rule measures of them."""

    def __init__(self, case: Case):
        self.case = case
        self.works: list[list[int]] = [[] for _ in range(case.world_size)]
        self.loads = [0] * case.world_size
        self.mean = sum(case.work) / case.world_size

    def give(self, rank: int, work: int) -> None:
        self.works[rank].append(work)
        self.loads[rank] += work

    def least(self, measures: list) -> int:
        """The first of the ranks with the least."""
        return measures.index(min(measures))


Choose = Callable[[Ranks, int, int], int]
"""From what the ranks have, the turn and the work of the matrix: the rank that gets it."""


class Choice(NamedTuple):
    """A way to choose a rank, in words, and what to do instead where it is not the right one."""

    words: str
    choose: Choose
    instead: str = "give each to the rank that has the least work so far"


def _measured(measure: Callable[[list[int]], object]) -> Choose:
    """The first rank with the least, by a measure of its matrices' work."""
    return lambda ranks, turn, work: ranks.least([measure(own) for own in ranks.works])


def _to_the_last_of_equals(ranks: Ranks, turn: int, work: int) -> int:
    return len(ranks.loads) - 1 - ranks.least(ranks.loads[::-1])


def _there_and_back(ranks: Ranks, turn: int, work: int) -> int:
    row, place = divmod(turn, len(ranks.loads))
    return len(ranks.loads) - 1 - place if row % 2 else place


def _until_its_share(ranks: Ranks, turn: int, work: int) -> int:
    """The first rank that has less than the mean: those that follow each other stay together."""
    last = len(ranks.loads) - 1
    return next((rank for rank, load in enumerate(ranks.loads) if load < ranks.mean), last)


def _block(size: Callable[[int, int], int], ranks: Ranks, turn: int, work: int) -> int:
    """The rank of a turn, if each rank gets as many that follow each other."""
    return min(turn // max(1, size(len(ranks.case.work), len(ranks.loads))), len(ranks.loads) - 1)


def _equal_part(ranks: Ranks, turn: int, work: int) -> int:
    return turn * len(ranks.loads) // len(ranks.case.work)


def _part_as_split(ranks: Ranks, turn: int, work: int) -> int:
    """As torch.tensor_split and numpy.array_split: the first ranks get one more."""
    size, more = divmod(len(ranks.case.work), len(ranks.loads))
    return turn // (size + 1) if turn < more * (size + 1) else more + (turn - more * (size + 1)) // size


def _fitting(which: Callable, otherwise: Callable, ranks: Ranks, turn: int, work: int) -> int:
    """A rank that stays within the mean; if there is none, another."""
    room = [rank for rank, load in enumerate(ranks.loads) if load + work <= ranks.mean]
    return which(room, key=lambda rank: ranks.loads[rank]) if room else otherwise(ranks)


_COUNT = "count their work and not the matrices, and "
_LEAST = "give each to the rank that has the least work so far"
_FILLED_UP = "a rank that is filled up to the mean before others get one"
_LEAST_OF = "each matrix goes to the rank with the {}"
_SAME_NUMBER = "each rank gets equally many matrices, which follow each other"
LEAST_WORK = Choice("each matrix goes to the rank with the least work", _measured(sum))
CHOICES = (
    LEAST_WORK,
    Choice(LEAST_WORK.words, _to_the_last_of_equals),
    *(
        Choice(
            f"every matrix goes to {which}, because you say so, because it has the most work so far, "
            "or because work is never added to it",
            choose,
        )
        for which, choose in (
            ("rank 0", lambda ranks, turn, work: 0),
            ("the last rank", lambda ranks, turn, work: len(ranks.loads) - 1),
        )
    ),
    Choice(
        "the matrices are dealt out in turn, so that the ranks have equally many",
        lambda ranks, turn, work: turn % len(ranks.loads),
        _COUNT + _LEAST,
    ),
    Choice("the matrices are dealt out there and back", _there_and_back),
    Choice(
        "each rank in turn gets two matrices that follow each other",
        lambda ranks, turn, work: turn // 2 % len(ranks.loads),
    ),
    Choice(
        "each matrix goes to the rank with the fewest matrices, and their work counts only between ranks "
        "that have equally many",
        _measured(lambda own: (len(own), sum(own))),
        _COUNT + _LEAST,
    ),
    Choice(
        _LEAST_OF.format("least work in its last matrix alone"),
        _measured(lambda own: own[-1] if own else 0),
        "add each matrix's work to that of the rank's earlier ones, with +=",
    ),
    *(
        Choice(_LEAST_OF.format(words), _measured(measure), f"add up the work itself, and {_LEAST}")
        for words, measure in {
            "least sum of the squares of its work": lambda own: sum(each**2 for each in own),
            "least sum of the roots of its work": lambda own: sum(sqrt(each) for each in own),
            "least product of its work and its number of matrices": lambda own: len(own) * sum(own),
            "least mean work of its matrices": lambda own: sum(own) / max(1, len(own)),
            "least work in its largest one": lambda own: max(own, default=0),
        }.items()
    ),
    Choice("neighbours stay together, and a rank takes matrices until it has its share", _until_its_share),
    *(
        Choice(_SAME_NUMBER, choose, _COUNT + _LEAST)
        for choose in (
            partial(_block, lambda many, ranks: -(-many // ranks)),
            partial(_block, lambda many, ranks: many // ranks),
            _equal_part,
            _part_as_split,
        )
    ),
    *(
        Choice(
            f"each matrix goes to {which}, and where no rank has room for it to {otherwise}",
            partial(_fitting, find, find_other),
        )
        for (which, find), (otherwise, find_other) in product(
            (
                (_FILLED_UP, lambda room, key: room[0]),
                (_FILLED_UP, max),
                ("the emptiest rank that has room for it, up to the mean", min),
            ),
            {
                "the last rank": lambda ranks: len(ranks.loads) - 1,
                "rank 0": lambda ranks: 0,
                "the rank with the least work": lambda ranks: ranks.least(ranks.loads),
            }.items(),
        )
        if (find, otherwise) != (min, "the rank with the least work")  # which is the right one
    ),
)
