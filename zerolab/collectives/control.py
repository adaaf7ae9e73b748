"""Control: exchange small messages between the ranks' CPUs, and check each collective.

A collective ends when all ranks have issued it. So each is announced when it is issued, and compared with the
announcement of another rank before its result is used (collective_check.py). Rows of a few bytes, such as
masks and norms, are exchanged here too, in log2 N rounds: with 16,384 ranks that is 14 messages and not
16,383. On GPUs none of this makes the device wait.
"""

import itertools
import weakref
import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist

from zerolab.collectives.collective_check import MESSAGE_BYTES, CollectiveCheck
from zerolab.collectives.comm_thread import Collective, CommThread

TAGS = 2**20  # of one Comm. Tags below the first 2**20 are left to the user
_EXCHANGE_TAGS = 2**12  # of these, for exchanges: each kind has its own tag, because their sizes differ
_COMMS = 1023  # a group's Comms with tags of their own, as a tag has 31 bits; later ones share them
"""The tags of one Comm, from its first: two for each subject of a collective, then those of the exchanges,
and the last for the collective check.
"""

_comms_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count]" = weakref.WeakKeyDictionary()
"""By group: models that share a group must not receive each other's messages."""


class Control:
    """One rank's end of the control messages of a Comm. A thread runs them, and gloo's collectives.

    Args:
        group: has to have gloo for CPUs.
        whole: the control of all ranks of a training, where this group is a part of them. Then collectives of
            both are announced in one ring and run by one thread, so that a rank in one and a rank in the
            other find each other.
    Attributes:
        check_bytes: what the check of one collective sends.
        peers: the ranks to send to and to receive from, in turn, so that no rank is sent to by all at once.
    """

    check_bytes = MESSAGE_BYTES

    def __init__(self, group: dist.ProcessGroup, whole: "Control | None" = None):
        self.group = group
        self.rank, self.world_size = rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        self.peers = [
            ((rank + step) % world_size, (rank - step) % world_size) for step in range(1, world_size)
        ]
        number = next(_comms_made.setdefault(group, itertools.count()))
        self.first_tag = (1 + number % _COMMS) * TAGS
        if whole is None:
            self._check = CollectiveCheck(group, self.first_tag + TAGS - 1)
            self._thread = CommThread()
        else:
            self._check, self._thread = whole._check, whole._thread

    def submit(self, what: str, collective: Collective | None = None) -> Callable[[], None]:
        """Run a collective, and check that all ranks issue it as ``what``; returns the wait for both."""
        return self._thread.submit(self._checked(what, iter([None]) if collective is None else collective))

    def _checked(self, what: str, collective: Collective) -> Collective:
        """The collective, with its check under way beside its first messages."""
        wait_and_compare = self._check.start(what)
        next(collective)  # it posts its first messages
        yield
        announced = False
        try:
            wait_and_compare()
            announced = True
            yield from collective  # it waits for them
        except RuntimeError as error:
            if "Timed out waiting" not in str(error):
                raise
            others = "the other ranks" if announced else f"rank {self._check.waited_for}"
            raise RuntimeError(self._late(others, what)) from error

    def _late(self, others: str, what: str) -> str:
        """For an error where the timeout of the group has passed, which is that of gloo's messages, too."""
        seconds = self.group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        return (
            f"rank {self._check.rank} waited {seconds:g} s for {others} at {what}; that is the timeout of "
            "the process group. Find out what the other ranks do meanwhile, or give the group more time: "
            "torch.distributed.init_process_group(timeout=...), or new_group(timeout=...)"
        )

    def exchange(self, rows: torch.Tensor, about: str) -> None:
        """Give every rank the rows of all, of which each has its own.

        Shapes: rows [world_size, bytes]. Comm: N-1 rows, in `rounds` messages.
        """
        shifted = _normal(torch.roll(rows, -self.rank, 0))
        self.submit(f"exchange of {about}", self._gather(shifted, self._tag(about)))()
        rows.copy_(torch.roll(shifted, self.rank, 0))

    def maximum(self, row: torch.Tensor, about: str) -> None:
        """Replace every rank's row by the elementwise maximum of all.

        Shapes: row [bytes]. Comm: a row, in each of `rounds` messages.
        """
        found = _normal(row)
        self.submit(f"exchange of {about}", self._spread(found, self._tag(about)))()
        row.copy_(found)

    def _tag(self, about: str) -> int:
        return self.first_tag + TAGS - 2 - zlib.crc32(about.encode()) % _EXCHANGE_TAGS

    @property
    def rounds(self) -> int:
        """How many messages it takes until every rank has data from every other: log2 N, rounded up."""
        return (self.world_size - 1).bit_length()

    def _gather(self, shifted: torch.Tensor, tag: int) -> Collective:
        """Bruck's algorithm: a rank has its own row and those of some ranks after it, and sends them to one
        that lacks just these. Each round doubles what a rank has.

        Shapes: shifted [world_size, bytes], this rank's row first, and those of the ranks after it.
        Source: Bruck et al. 1997, Efficient algorithms for all-to-all communications, the concatenation.
        """
        for number in range(self.rounds):
            have = 2**number
            new = shifted[have : 2 * have]
            to, source = (self.rank - have) % self.world_size, (self.rank + have) % self.world_size
            yield from arrival(self.post(shifted[: len(new)], to, new, source, tag))

    def _spread(self, row: torch.Tensor, tag: int) -> Collective:
        """Each round doubles the number of ranks that a rank has heard of.

        At the end it hears of some twice, which changes no maximum.
        """
        landing = torch.empty_like(row)
        for number in range(self.rounds):
            to, source = ((self.rank + sign * 2**number) % self.world_size for sign in (-1, 1))
            yield from arrival(self.post(row.clone(), to, landing, source, tag))
            torch.maximum(row, landing, out=row)

    def post(
        self, outgoing: torch.Tensor, to: int, incoming: torch.Tensor, source: int, tag: int
    ) -> list[dist.Work]:
        """Start one receive and one send, each unless its tensor is empty.

        By the group's own methods: gathers go on after a training loop has called destroy_process_group(),
        and the functions of torch.distributed do not know the group any more.
        """
        works = [self.group.recv([incoming], source, tag)] if incoming.numel() else []
        return [*works, self.group.send([outgoing], to, tag)] if outgoing.numel() else works


class SilentControl(Control):
    """For a rehearsal, whose only rank sends nothing: the rows of all others are copies of its own."""

    check_bytes = 0

    def submit(self, what: str, collective: Collective | None = None) -> Callable[[], None]:
        return lambda: None

    def exchange(self, rows: torch.Tensor, about: str) -> None:
        rows[:] = rows[self.rank].clone()

    def maximum(self, row: torch.Tensor, about: str) -> None:
        """All rows are this one."""


def arrival(works: list[dist.Work]) -> Collective:
    """Yield once after messages were posted; wait for them when resumed."""
    yield
    for work in works:
        work.wait()


def _normal(message: torch.Tensor) -> torch.Tensor:
    """Return a copy that the thread may write to, where the caller is in torch.inference_mode() too."""
    with torch.inference_mode(False):
        return message.clone()
