"""RollCall: each rank tells its neighbour which collective it issues, so that none waits for another's.

A collective ends when all ranks have issued it. Where one took another path through the model, at stage 3
above all, it issues something else, and both would wait for ever, without a word.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

MESSAGE_BYTES = 64
TAG = 2**30  # beyond any unit's


class RollCall:
    """The ranks of a group in a ring. At each collective every one tells the next what it takes part in.

    Wherever two ranks differ some two neighbours do, so one small message a rank finds it. Messages of one
    tag arrive in the order they were sent: the k-th is about the k-th collective.

    Comm: 64 bytes a rank and collective.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.count = 0

    def begin(self, what: str) -> "Answer":
        """Say what this rank issues. The answer is to be waited for before the collective is."""
        mine = torch.frombuffer(
            bytearray(what.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES)), dtype=torch.uint8
        )
        theirs, before = torch.empty_like(mine), (self.rank - 1) % self.world_size
        after = (self.rank + 1) % self.world_size
        handles = [
            dist.irecv(theirs, group=self.group, group_src=before, tag=TAG),
            dist.isend(mine, group=self.group, group_dst=after, tag=TAG),
        ]
        self.count += 1
        return Answer(handles, self.count, mine, self.rank, theirs, before)


@dataclass
class Answer:
    """What the rank before this one issued as its collective of the same number."""

    handles: list
    number: int
    mine: torch.Tensor
    rank: int
    theirs: torch.Tensor
    before: int

    def wait(self) -> None:
        """Raises: RuntimeError where it is another than this rank's."""
        for handle in self.handles:
            handle.wait()
        if not torch.equal(self.mine, self.theirs):
            raise RuntimeError(
                f"ranks took different paths. Collective {self.number} since the optimizer was built is "
                f"{_text(self.theirs)} on rank {self.before} and {_text(self.mine)} on rank {self.rank}. "
                "Every rank must make as many passes, steps and saves as the others, through the same units. "
                "Where the path depends on the data: use a stage below 3, or run every branch on every rank, "
                "or pass units= with the module that holds all branches"
            )


def _text(message: torch.Tensor) -> str:
    return bytes(message.tolist()).decode(errors="replace").strip()
