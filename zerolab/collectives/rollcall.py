"""RollCall: each rank tells its neighbour which collective it issues, so that none waits for another's.

A collective ends when all ranks have issued it. Where one took another path through the model, at stage 3
above all, it issues something else, and both would wait for ever, without a word.
"""

import hashlib
from collections.abc import Callable

import torch
import torch.distributed as dist

MESSAGE_BYTES, DIGEST_BYTES = 64, 8
_TEXT_BYTES = MESSAGE_BYTES - DIGEST_BYTES


class RollCall:
    """The ranks of a group in a ring. At each collective every one tells the next what it takes part in.

    Wherever two ranks differ some two neighbours do, so one small message a rank finds it. Messages of one
    tag arrive in the order they were sent: the k-th is about the k-th collective.

    Comm: 64 bytes a rank and collective.
    """

    def __init__(self, group: dist.ProcessGroup, tag: int):
        self.group, self.tag = group, tag
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._count = 0

    def call(self, what: str) -> Callable[[], None]:
        """Say what this rank takes part in; what is returned waits to hear it of the rank before.

        In between the collective's own messages can be sent: they bear its unit's tag, and another's do not
        meet them. Waiting first made two ranks send and receive in step, in small pieces, at twice the cost.

        Raises: RuntimeError, from what is returned, where that rank takes part in something else.
        """
        digest = hashlib.blake2b(what.encode(), digest_size=DIGEST_BYTES).digest()  # of names of any length
        text = _shortened(what.encode()).ljust(_TEXT_BYTES)
        mine = torch.frombuffer(bytearray(text + digest), dtype=torch.uint8)
        theirs = torch.empty_like(mine)
        before, after = (self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size
        self._count += 1
        number = self._count
        heard = dist.irecv(theirs, group=self.group, group_src=before, tag=self.tag)
        said = dist.isend(mine, group=self.group, group_dst=after, tag=self.tag)

        def hear() -> None:
            heard.wait()
            said.wait()
            if not torch.equal(mine, theirs):
                self._refuse(number, before, theirs, mine)

        return hear

    def _refuse(self, number: int, before: int, theirs: torch.Tensor, mine: torch.Tensor) -> None:
        raise RuntimeError(
            f"ranks took different paths. Collective {number} since the optimizer was built is "
            f"{_text(theirs)} on rank {before} and {_text(mine)} on rank {self.rank}. "
            "Every rank must make as many passes, steps and saves as the others. Where at stage 3 the path "
            "depends on the data: pass units=[], which makes the whole model one unit, or units=[module] "
            "with one whose own forward has all branches; or run every branch on every rank, or take stage 2"
        )


def _shortened(text: bytes) -> bytes:
    """Its beginning and its end, which tell names apart; the digest is of the whole."""
    return text if len(text) <= _TEXT_BYTES else text[:20] + b"..." + text[23 - _TEXT_BYTES :]


def _text(message: torch.Tensor) -> str:
    return bytes(message[:_TEXT_BYTES].tolist()).decode(errors="replace").strip()
