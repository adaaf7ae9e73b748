"""CollectiveCheck: find ranks that issue different collectives, instead of letting them wait for ever.

A collective ends when all ranks have issued it. Where one rank took another path through the model, as can
happen at stage 3, it issues a different collective, and both would wait for ever without an error.
"""

import hashlib
from collections.abc import Callable

import torch
import torch.distributed as dist

MESSAGE_BYTES, DIGEST_BYTES = 64, 8
_TEXT_BYTES = MESSAGE_BYTES - DIGEST_BYTES


class CollectiveCheck:
    """The ranks of a group in a ring. Before each collective, every rank tells the next what it is.

    Where any two ranks differ, some two neighbours differ, so one small message a rank is enough. Messages of
    one tag arrive in the order they were sent: the k-th is about the k-th collective.

    Attributes: waited_for: the rank whose message the last wait was for.
    Comm: 64 bytes a rank and collective.
    """

    def __init__(self, group: dist.ProcessGroup, tag: int):
        self.group, self.tag = group, tag
        self.rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        self.before, self.after = (self.rank - 1) % world_size, (self.rank + 1) % world_size
        self.waited_for = self.before
        self._count = 0

    def start(self, what: str) -> Callable[[], None]:
        """Send ``what`` this rank issues to the next rank; returns wait_and_compare, for the rank before.

        The collective's own messages can be sent in between: their tags are their unit's. When ranks waited
        for the check first, they sent and received in small pieces, at twice the cost.

        Raises: RuntimeError, from wait_and_compare, where the rank before issues something else.
        """
        digest = hashlib.blake2b(
            what.encode(), digest_size=DIGEST_BYTES
        ).digest()  # names can be of any length
        text = _shortened(what.encode()).ljust(_TEXT_BYTES)
        mine = torch.frombuffer(bytearray(text + digest), dtype=torch.uint8)
        theirs = torch.empty_like(mine)
        self._count += 1
        number = self._count
        received = self.group.recv([theirs], self.before, self.tag)
        sent = self.group.send([mine], self.after, self.tag)

        def wait_and_compare() -> None:
            self.waited_for = self.before
            received.wait()
            self.waited_for = self.after
            sent.wait()
            if not torch.equal(mine, theirs):
                self._refuse(number, theirs, mine)

        return wait_and_compare

    def _refuse(self, number: int, theirs: torch.Tensor, mine: torch.Tensor) -> None:
        raise RuntimeError(
            f"ranks took different paths. Collective {number} since the optimizer was built is "
            f"{_text(theirs)} on rank {self.before} and {_text(mine)} on rank {self.rank}. "
            "Every rank must make as many passes, steps and saves as the others, and clear gradients where "
            "they do. Where at stage 3 the path depends on the data: pass units=[], which makes the whole "
            "model one unit, or units=[module] with one whose own forward has all branches; or run every "
            "branch on every rank, or take stage 2"
        )


def _shortened(text: bytes) -> bytes:
    """Return the beginning and the end of a text, which tell names apart; the digest is of the whole."""
    return text if len(text) <= _TEXT_BYTES else text[:20] + b"..." + text[23 - _TEXT_BYTES :]


def _text(message: torch.Tensor) -> str:
    return bytes(message[:_TEXT_BYTES].tolist()).decode(errors="replace").strip()
