"""Lesson 06's exercise on the peak: wrong answers as sums of the right number and of what is given."""

from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

import torch


class Case(NamedTuple):
    """The parameters of the root and of each block, and how many blocks are gathered ahead."""

    root: int
    blocks: tuple[int, ...]
    prefetch: int

    def windows(self, length: int) -> list[int]:
        """Return the sums of so many neighbouring blocks, from each block on; near the end of fewer."""
        return [sum(self.blocks[i : i + length]) for i in range(len(self.blocks))]

    def largest(self, count: int) -> int:
        """Return the sum of the largest blocks."""
        return sum(sorted(self.blocks)[-count:]) if count else 0

    @property
    def largest_at(self) -> int:
        return self.blocks.index(max(self.blocks))

    @property
    def right(self) -> int:
        return self.root + max(self.windows(self.prefetch + 1))

    def terms(self) -> dict[str, float]:
        """Return what a wrong answer may have in it, by name."""
        return {
            "the right number": self.right,
            "1": 1,
            "prefetch": self.prefetch,
            "root": self.root,
            "the number of blocks": len(self.blocks),
            "the largest block": max(self.blocks),
            "the smallest block": min(self.blocks),
            "the first block": self.blocks[0],
            "the last block": self.blocks[-1],
            "all blocks": sum(self.blocks),
            "prefetch × root": self.prefetch * self.root,
            "prefetch × the largest block": self.prefetch * max(self.blocks),
        }

    def __str__(self) -> str:
        return f"root {self.root}, blocks {list(self.blocks)}, prefetch={self.prefetch}"


def as_a_sum(answers: Mapping[Case, float]) -> str | None:
    """Say of which multiples of at most three terms each answer is the sum."""
    got = torch.tensor(list(answers.values()), dtype=torch.float64)
    columns = {name: torch.tensor([float(case.terms()[name]) for case in answers]).double()
               for name in next(iter(answers)).terms()}  # fmt: skip
    for count in (1, 2, 3):
        for names in combinations(columns, count):
            table = torch.stack([columns[name] for name in names], dim=1)
            factors = torch.linalg.lstsq(table, got.unsqueeze(1), driver="gelsd").solution.flatten()
            if torch.allclose(table @ factors, got, rtol=1e-9, atol=1e-6):
                return f"in every case it is {_in_words(dict(zip(names, factors.tolist(), strict=True)))}"
    return None


def _in_words(factors: Mapping[str, float]) -> str:
    terms = [_term(round(factor, 6), name) for name, factor in factors.items() if abs(factor) > 1e-6]
    return " + ".join(terms).replace("+ -", "- ") or "0"


def _term(factor: float, name: str) -> str:
    if name == "1":
        return f"{factor:g}"
    return name if factor == 1 else f"-{name}" if factor == -1 else f"{factor:g} × {name}"
