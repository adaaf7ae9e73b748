"""A ring all-reduce as it is, and with a mistake in its rounds: all ranks in one process, round by round.

A ring may run to the right or to the left, and a rank may end its first half with its own chunk or with one
beside it: each mistake is run in all of these rings. Two mistakes can lead to the same values, so what the
ranks sent is compared, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import torch

from zerolab.course.attempts import Odd
from zerolab.course.evidence import same
from zerolab.course.messages import Calls

NONE = -1000
Seen = Sequence[torch.Tensor | Odd]
Brought = Sequence[torch.Tensor]
Cuts = Sequence[slice]
Messages = Calls
"""By rank: what it sent."""


class Ended(NamedTuple):
    """By rank: what is in its tensor after all rounds, and all that it sent, end to end."""

    held: list[torch.Tensor]
    sent: list[torch.Tensor]

    def sends(self, messages: Messages) -> bool:
        """Whether the messages, as far as they are known, are those of these rounds."""
        for own, said in zip(messages, self.sent, strict=True):
            if sum(message.numel for message in own) != said.numel():
                return False
            known = [message.content for message in own]
            if None not in known and known:
                numbers = torch.tensor([each for content in known for each in content or ()])
                if not torch.allclose(numbers.double(), said.double(), 1e-4, 1e-5):
                    return False
        return True


class Ring(NamedTuple):
    """How the rounds go; the defaults are those of a right ring.

    Attributes:
        way: 1 where a rank sends to the next, -1 where it sends to the previous one.
        ahead: rank r's first half completes chunk r + ahead.
        more_first, more_second: rounds beyond N-1 in each half; NONE for no round at all.
        begins: how many rounds too early, or too late, the chunk is that the second half sends first.
        lands: how many chunks too far what arrives in the first half is put.
        keeps, takes: how often a chunk counts in the first half, and what arrives, when they are added.
        adds: whether what arrives in the second half is added.
        lost: whether what arrives in the second half is not put into the tensor; passed: and yet sent on.
        against: the halves, 0 and 1, whose messages go the other way than its indices.
    """

    way: int = 1
    ahead: int = 0
    more_first: int = 0
    more_second: int = 0
    begins: int = 0
    lands: int = 0
    keeps: float = 1
    takes: float = 1
    adds: bool = False
    lost: bool = False
    passed: bool = False
    against: tuple[int, ...] = ()

    def run(self, brought: Brought, cuts: Cuts) -> Ended | None:
        """Return what all ranks end with, and send; nothing where a chunk would land in another length."""
        held = [tensor.clone() for tensor in brought]
        n, ranks = len(held), range(len(held))
        said: list[list[torch.Tensor]] = [[] for _ in ranks]
        came = [torch.empty(0)] * n
        for half, turn in self.turns(n):
            goes = -self.way if half in self.against else self.way
            begin = (self.ahead - self.way) if half == 0 else (self.ahead + self.way * self.begins)
            sent = [(rank + begin - self.way * turn) % n for rank in ranks]
            on = self.passed and half == 1 and turn > 0
            leaves = [came[rank] if on else held[rank][cuts[sent[rank]]].clone() for rank in ranks]
            came = [leaves[(rank - goes) % n] for rank in ranks]
            for rank in ranks:
                said[rank].append(leaves[rank])
                into = cuts[(sent[rank] - self.way + self.lands * (half == 0)) % n]
                if held[rank][into].shape != came[rank].shape:
                    return None
                held[rank][into] = self.landed(held[rank][into], came[rank], half)
        return Ended(held, [torch.cat(own) if own else torch.empty(0) for own in said])

    def turns(self, world_size: int) -> Iterator[tuple[int, int]]:
        """The halves, 0 and 1, and the rounds of each."""
        for half, more in ((0, self.more_first), (1, self.more_second)):
            yield from ((half, turn) for turn in range(world_size - 1 + more))

    def landed(self, chunk: torch.Tensor, arriving: torch.Tensor, half: int) -> torch.Tensor:
        """Return what a chunk becomes when another one arrives."""
        if half == 0:
            return self.keeps * chunk + self.takes * arriving
        if self.lost:
            return chunk
        return chunk + arriving if self.adds else arriving


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
    "the first half replaces a chunk by what arrives, and the second half adds: first add up, which makes a "
    "chunk on each rank complete, then let the complete chunks replace the others":
        (Ring(keeps=0, adds=True), Ring(keeps=0, adds=True, begins=-1)),
    "the second half is the first half once more, so sums are added to sums: in the second half a complete "
    "chunk replaces the old one":
        (Ring(adds=True, begins=-1),),
    "only its own chunk is complete, the others hold partial sums: what arrives in the second half is not "
    "written into `tensor`. `piece.copy_(buffer)` writes there, and `pieces[k] = buffer` changes a list":
        (Ring(lost=True), Ring(lost=True, passed=True)),
    "the second half is one round short, so one chunk of each rank is still a partial sum":
        (Ring(more_second=-1),),
    "the first half is one round short, so one rank's numbers are missing in every chunk: it has N-1 rounds":
        (Ring(more_first=-1),),
    "each half is one round short: N ranks need N-1 rounds in each":
        (Ring(more_first=-1, more_second=-1),),
    "the first half has a round too many, so the second half passes on sums in which numbers count twice":
        (Ring(more_first=1, begins=1), Ring(more_first=1, begins=-1)),
    "the second half begins with a chunk that is not complete. In its first round a rank sends the chunk "
    "that arrived last in the first half, the only one with the whole sum: shift the indices by one, if the "
    "sums of the first half are in the tensor that the second half sends":
        (Ring(begins=1), Ring(begins=-1)),
    "the first half replaces a chunk by what arrives, so nothing is added up: add what arrives":
        (Ring(keeps=0),),
    "the first half adds what arrives to another chunk than the one that was sent: the sender's index of a "
    "round is the receiver's, too":
        (Ring(lands=1), Ring(lands=-1)),
    "the second half sends to the other neighbour than its indices are for: they go one down, k, then k-1, "
    "where messages go to the next rank, and one up where they go to the one before":
        (Ring(against=(1,)),),
    "the first half sends to the other neighbour than its indices are for: they go one down, k, then k-1, "
    "where messages go to the next rank, and one up where they go to the one before":
        (Ring(against=(0,)),),
    "both halves send to the other neighbour than their indices are for: they go one down, k, then k-1, "
    "where messages go to the next rank, and one up where they go to the one before":
        (Ring(against=(0, 1)),),
    "each round of the first half takes the mean of two: add up there":
        (Ring(keeps=0.5, takes=0.5),),
    "in the first half what arrives is added twice in each round: add it once":
        (Ring(takes=2),),
    "in the first half what arrives is subtracted: add it":
        (Ring(takes=-1),),
    "in the first half a rank receives into the chunk itself, and adds that to itself. Its own numbers are "
    "lost, and what arrives counts twice: receive into a buffer, and add the buffer":
        (Ring(keeps=0, takes=2),),
}
FIRST_HALF = {
    "each rank sends to the other neighbour than its indices are for: they go one down, k, then k-1, where "
    "messages go to the next rank, and one up where they go to the one before":
        (Ring(against=(0,)),),
    "what arrives is added to another chunk than the one that was sent: the sender's index of a round is the "
    "receiver's, too":
        (Ring(lands=1), Ring(lands=-1)),
    "each round takes the mean of two: add up":
        (Ring(keeps=0.5, takes=0.5),),
    "what arrives is added twice in each round: add it once":
        (Ring(takes=2),),
    "what arrives is subtracted: add it":
        (Ring(takes=-1),),
    "a rank receives into the chunk itself, and adds that to itself. Its own numbers are lost, and what "
    "arrives counts twice: receive into a buffer, and add the buffer":
        (Ring(keeps=0, takes=2),),
}
# fmt: on


def of_first_half(
    seen: Seen, left: Brought, brought: Brought, cuts: Cuts, messages: Messages
) -> dict[str, list[torch.Tensor]]:
    """The mistakes of a reduce-scatter's rounds that explain each rank's own chunk, and what they lead to.

    `left`: the ranks' tensors at the end. They count where the chunks alone are what they were.
    """
    found: dict[str, list[torch.Tensor]] = {}
    begun = _own(brought, cuts)
    for sentence, ring in _rings(FIRST_HALF):
        ended = ring._replace(more_second=NONE).run(brought, cuts)
        if not ended or not ended.sends(messages) or not _all_same(seen, _own(ended.held, cuts)):
            continue
        own = _own(ended.held, cuts)
        if not _all_same(own, begun) or _all_same(left, ended.held):
            found[sentence] = own
    return found


def explaining(seen: Seen, brought: Brought, cuts: Cuts, messages: Messages) -> dict[str, list[torch.Tensor]]:
    """The mistakes that explain what the ranks ended with, and what they sent; and what they lead to."""
    found: dict[str, list[torch.Tensor]] = {}
    for sentence, ring in _rings(MISTAKES):
        ended = ring.run(brought, cuts)
        if ended and ended.sends(messages) and _all_same(seen, ended.held):
            found[sentence] = ended.held
    return found


def _own(whole: Brought, cuts: Cuts) -> list[torch.Tensor]:
    return [tensor[cut] for tensor, cut in zip(whole, cuts, strict=True)]


def _all_same(seen: Seen, wanted: Sequence[torch.Tensor]) -> bool:
    return all(same(*pair) for pair in zip(seen, wanted, strict=True))


def _rings(mistakes: Mapping[str, tuple[Ring, ...]]) -> Iterator[tuple[str, Ring]]:
    """Each mistake in rings to the right and left, which complete a rank's own chunk or one beside it."""
    for sentence, rings in mistakes.items():
        for ring, way, ahead in product(rings, (1, -1), (0, 1, -1)):
            yield sentence, ring._replace(way=way, ahead=ahead)
