"""A ring all-reduce as it is, and with a mistake in its rounds: all ranks in one process, round by round.

A ring may run to the right or to the left, and a rank may end its first half with its own chunk or with one
beside it: each mistake is run in all of these rings. Two mistakes can lead to the same values, so the number
of messages counts, too.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch

from zerolab.course.evidence import same

NONE = -1000


class Ring(NamedTuple):
    """How the rounds go; the defaults are those of a right ring.

    Attributes:
        way: 1 where a rank sends to the next, -1 where it sends to the previous one.
        ahead: rank r's first half completes chunk r + ahead.
        more_first, more_second: rounds beyond N-1 in each half; NONE for no round at all.
        begins: how many rounds too early, or too late, the chunk is that the second half sends first.
        lands: how many chunks too far what arrives in the first half is put.
        replaces: whether what arrives in the first half replaces a chunk.
        adds: whether what arrives in the second half is added.
        averages: whether the mean is taken in each round of the first half.
        against: the halves, 0 and 1, whose messages go the other way than its indices.
    """

    way: int = 1
    ahead: int = 0
    more_first: int = 0
    more_second: int = 0
    begins: int = 0
    lands: int = 0
    replaces: bool = False
    adds: bool = False
    averages: bool = False
    against: tuple[int, ...] = ()

    def ended(self, brought: Sequence[torch.Tensor], cuts: Sequence[slice]) -> list[torch.Tensor]:
        """Return what every rank ends with; nothing where a chunk would land in one of another length."""
        held = [tensor.clone() for tensor in brought]
        n, ranks = len(held), range(len(held))
        for half, more in ((0, self.more_first), (1, self.more_second)):
            goes = -self.way if half in self.against else self.way
            for turn in range(n - 1 + more):
                begin = (self.ahead - self.way) if half == 0 else (self.ahead + self.way * self.begins)
                sent = [(rank + begin - self.way * turn) % n for rank in ranks]
                arriving = [held[rank][cuts[sent[rank]]].clone() for rank in ranks]
                for rank in ranks:
                    what = arriving[(rank - goes) % n]
                    into = cuts[(sent[rank] - self.way + self.lands * (half == 0)) % n]
                    if held[rank][into].shape != what.shape:
                        return [torch.empty(0)] * n
                    held[rank][into] = self.landed(held[rank][into], what, half)
        return held

    def rounds(self, world_size: int) -> int:
        """Return how many rounds there are, and messages of each rank."""
        return sum(max(0, world_size - 1 + more) for more in (self.more_first, self.more_second))

    def landed(self, chunk: torch.Tensor, arriving: torch.Tensor, half: int) -> torch.Tensor:
        """Return what a chunk becomes when another one arrives."""
        if half == 0 and self.averages:
            return (chunk + arriving) / 2
        adds = self.adds if half else not self.replaces
        return chunk + arriving if adds else arriving


# A sentence, and what is wrong with the rounds.
# fmt: off
MISTAKES = {
    "only its own chunk is complete, the others hold partial sums: the second half is missing, in which the "
    "complete chunks go around":
        (Ring(more_second=NONE),),
    "the chunks went around without being added up: that is an all-gather. Reduce-scatter first":
        (Ring(more_first=NONE),),
    "the second half adds what arrives: a chunk that arrives there is complete, so put it in place":
        (Ring(adds=True),),
    "the second half is one round short, so one chunk of each rank is still a partial sum":
        (Ring(more_second=-1),),
    "the first half is one round short, so one rank's numbers are missing in every chunk: it has N-1 rounds":
        (Ring(more_first=-1),),
    "each half is one round short: N ranks need N-1 rounds in each":
        (Ring(more_first=-1, more_second=-1),),
    "the first half has a round too many, so the second half passes on sums in which numbers count twice":
        (Ring(more_first=1, begins=1), Ring(more_first=1, begins=-1)),
    "the second half begins with a chunk that is not complete. In its first round a rank sends the chunk "
    "that arrived last in the first half, the only one with the whole sum: shift the indices by one":
        (Ring(begins=1), Ring(begins=-1)),
    "the first half replaces a chunk by what arrives, so nothing is added up: add what arrives":
        (Ring(replaces=True),),
    "the first half adds what arrives to another chunk than the one that was sent: the sender's index of a "
    "round is the receiver's, too":
        (Ring(lands=1), Ring(lands=-1)),
    "the second half sends to the other neighbour than its indices are for: they go one down, k, then k-1, "
    "where messages go to the right, and one up where they go to the left":
        (Ring(against=(1,)),),
    "the first half sends to the other neighbour than its indices are for: they go one down, k, then k-1, "
    "where messages go to the right, and one up where they go to the left":
        (Ring(against=(0,)),),
    "both halves send to the other neighbour than their indices are for: they go one down, k, then k-1, "
    "where messages go to the right, and one up where they go to the left":
        (Ring(against=(0, 1)),),
    "each round of the first half takes the mean of two: add up there":
        (Ring(averages=True),),
}
# fmt: on


def explaining(
    seen: Sequence[torch.Tensor], brought: Sequence[torch.Tensor], cuts: Sequence[slice], rounds: int
) -> dict[str, list[torch.Tensor]]:
    """The mistakes with so many rounds that explain what the ranks ended with, and what they lead to."""
    found: dict[str, list[torch.Tensor]] = {}
    for sentence, rings in MISTAKES.items():
        for ring, way, ahead in product(rings, (1, -1), (0, 1, -1)):
            if ring.rounds(len(brought)) == rounds:
                ended = ring._replace(way=way, ahead=ahead).ended(brought, cuts)
                if all(same(*pair) for pair in zip(seen, ended, strict=True)):
                    found[sentence] = ended
    return found
