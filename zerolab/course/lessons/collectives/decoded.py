"""Find out what each message of a ring holds: which elements of the tensor, and whose numbers are in it.

The ranks' tensors are random, so a message that is a sum of them is so at one place only.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from zerolab.course.messages import Calls, Message
from zerolab.course.reading import coefficients, present

Brought = Sequence[torch.Tensor]
Cuts = Sequence[slice]
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}


class Sent(NamedTuple):
    """A message: whose numbers count how often in which elements. Without factors it is zeros, or unknown."""

    sender: int
    receiver: int | None
    message: Message
    start: int = 0
    stop: int = 0
    factors: dict[int, float] = {}  # noqa: RUF012  never changed

    def complete(self, world_size: int) -> bool:
        """Whether these are sums over all ranks."""
        return len(self.factors) == world_size and all(abs(f - 1) < 1e-3 for f in self.factors.values())

    def covers(self, cut: slice) -> bool:
        return bool(self.factors) and self.start <= cut.start and cut.stop <= self.stop

    @property
    def zeros(self) -> bool:
        return self.message.content is not None and not any(self.message.content)


class Traffic:
    """All messages of an answer, by sender and by receiver, in order."""

    def __init__(self, calls: Calls, brought: Brought, cuts: Cuts):
        self.calls, self.brought, self.cuts = calls, brought, cuts

    @cached_property
    def sent(self) -> list[list[Sent]]:
        """By rank: what it sends."""
        return [
            [self._decoded(rank, call) for call in own if call.op == "send"]
            for rank, own in enumerate(self.calls)
        ]

    @cached_property
    def arrived(self) -> list[list[Sent]]:
        """By rank: what it receives, in the order of its receives."""
        queues = {
            (rank, to): iter([each for each in own if each.receiver == to])
            for rank, own in enumerate(self.sent)
            for to in range(len(self.calls))
        }
        found: list[list[Sent]] = []
        for rank, own in enumerate(self.calls):
            origins = [call.peer for call in own if call.received and call.peer is not None]
            arrivals = (next(queues.get((origin, rank), iter(())), None) for origin in origins)
            found.append([each for each in arrivals if each is not None])
        return found

    def everything(self) -> list[Sent]:
        return [each for own in self.sent for each in own]

    def chunk(self, each: Sent) -> str:
        """Return the name of the elements: a chunk, the whole tensor, or the elements themselves."""
        for number, cut in enumerate(self.cuts):
            if (each.start, each.stop) == (cut.start, cut.stop):
                return f"chunk {number}"
        if each.stop - each.start == self.cuts[-1].stop:
            return "the whole tensor"
        return f"elements {each.start} to {each.stop - 1}"

    def number(self, each: Sent) -> int | None:
        """Return which chunk a message is, if it is one."""
        cuts = [(cut.start, cut.stop) for cut in self.cuts]
        return cuts.index((each.start, each.stop)) if (each.start, each.stop) in cuts else None

    @cached_property
    def is_ring(self) -> bool:
        """Whether each rank sends to one neighbour alone, and receives from the other one."""
        n = len(self.calls)
        to = {((each.receiver or 0) - each.sender) % n for each in self.everything()}
        origin = {
            ((call.peer or 0) - rank) % n
            for rank, own in enumerate(self.calls)
            for call in own
            if call.received
        }
        return to in ({1}, {n - 1}) and origin == {(n - way) % n for way in to}

    @property
    def of_whole_tensors(self) -> bool:
        """Whether each message is as long as the tensor."""
        return all(each.message.numel >= self.cuts[-1].stop for each in self.everything())

    def mixed(self, each: Sent) -> list[int]:
        """Return the chunks whose numbers are added in a message that is no sum of one chunk's."""
        content = each.message.content or ()
        pieces = [(number, tensor[cut]) for number, cut in enumerate(self.cuts) for tensor in self.brought]
        length = min(len(content), *(piece.numel() for _, piece in pieces))
        if each.factors or length <= 2 * len(pieces):
            return []
        parts = {str(place): piece[:length] for place, (_, piece) in enumerate(pieces)}
        found = coefficients(torch.tensor(content[:length], dtype=torch.float64), parts)
        return sorted({pieces[int(name)][0] for name in present(found)}) if found else []

    def _decoded(self, sender: int, call: Message) -> Sent:
        plain = Sent(sender, call.peer, call)
        if call.content is None or not any(call.content):
            return plain
        numbers = torch.tensor(call.content, dtype=torch.float64)
        found = next(
            filter(None, (decoded(each, self.brought, self.cuts) for each in (numbers, _unpadded(numbers)))),
            None,
        )
        if found is None:
            return plain
        start, stop, factors = found
        return plain._replace(start=start, stop=stop, factors=factors)


def decoded(numbers: torch.Tensor, brought: Brought, cuts: Cuts) -> tuple[int, int, dict[int, float]] | None:
    """Return at which elements the numbers are a sum of the ranks', and how often each rank counts there."""
    length, whole = numbers.numel(), brought[0].numel()
    if length <= 2 * len(brought) or length > whole or not numbers.isfinite().all():
        return None
    tolerance = TOLERANCE.get(brought[0].dtype, 1e-8)
    table = torch.stack([tensor.double() for tensor in brought])
    likely = [cut.start for cut in cuts if cut.start + length <= whole]
    for starts in (likely, range(whole - length + 1)):
        windows = torch.stack([table[:, start : start + length].T for start in starts])
        values = numbers.expand(len(starts), length).unsqueeze(2)
        factors = torch.linalg.lstsq(windows, values).solution
        off = (windows @ factors - values).abs().amax(dim=(1, 2))
        best = int(off.argmin())
        if off[best] <= tolerance * numbers.abs().max():
            named = {str(rank): float(factor) for rank, factor in enumerate(factors[best, :, 0])}
            counted = {int(rank): named[rank] for rank in present(named)}
            return starts[best], starts[best] + length, counted
    return None


def _unpadded(numbers: torch.Tensor) -> torch.Tensor:
    """The numbers without zeros at the end."""
    there = numbers.nonzero()
    return numbers[: int(there.max()) + 1] if len(there) else numbers
