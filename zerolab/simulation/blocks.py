"""Models of many blocks that are alike: what holds for all follows from two models of a few.

Each block more adds the same operators and messages in the same order. So it adds the same seconds, once
messages that are late in one block have delayed those of the next as far as they ever do.
"""

REHEARSED = (4, 5)
"""The numbers of blocks that are rehearsed."""


def of_all_blocks(blocks: int, few: float, more: float) -> float:
    """Return what is ``few`` and ``more`` with the numbers of blocks of `REHEARSED`, for another number."""
    return few + (blocks - REHEARSED[0]) * (more - few) / (REHEARSED[1] - REHEARSED[0])
