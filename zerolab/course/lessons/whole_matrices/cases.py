"""Lesson 10's exercise: models whose matrices get owners."""

from collections.abc import Iterable
from typing import NamedTuple

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


_BLOCK = (7, 3, 9, 9)  # of a GPT, in units of h³: qkv, projection, and the two of the MLP
CASES = (
    Case(_BLOCK, 2),
    Case(_BLOCK * 3, 4),
    Case((5, 3, 3, 3), 2),  # with squares of the work 9 are left for the busiest, where 8 are possible
    Case((1, 2, 3, 4, 5, 6, 7, 8, 9), 3),
    Case(_BLOCK * 12, 8),
    Case((2, 2, 2, 3, 3), 2),
    Case((6, 1, 1, 1, 1, 1, 1), 2),
    Case((5, 3), 4),
    Case((7,) * 10, 3),
    Case((64**3, 128 * 64**2, 64**3, 3 * 64**3, 32**2 * 8), 3),
    Case((4, 4, 3), 1),
    Case((), 2),
    # Without a pattern: two rules that differ leave the ranks with different work.
    *(Case(tuple(37 * k * k % 101 + 1 for k in range(many)), ranks) for many, ranks in ((11, 3), (17, 4))),
    *(Case(tuple(1 + 53 * k * k % 89 for k in range(many)), ranks) for many, ranks in ((23, 5), (14, 2))),
)
