"""Lesson 09: the elements of a momentum that was loaded, each looked up in the one that was saved."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

ZERO, UNKNOWN = -1, -2  # in the place of an element's number


class Shard(NamedTuple):
    """One shard's momentum after a load.

    Attributes:
        rank, unit: whose shard it is, and which of the rank's.
        values: what was loaded.
        belongs: the elements of all that belong there, with ZERO for padding.
        found: the elements of all that are there, with ZERO and UNKNOWN.
    """

    rank: int
    unit: int
    values: torch.Tensor
    belongs: list[int]
    found: list[int]

    @property
    def wrong(self) -> list[int]:
        """The places where another element stands than the one that belongs there."""
        pairs = zip(self.belongs, self.found, strict=True)
        return [at for at, (right, there) in enumerate(pairs) if right != there and right != ZERO]


def look_up(values: torch.Tensor, whole: torch.Tensor) -> list[int]:
    """Which element of the whole momentum each value is. No two of them are equal, and none is 0."""
    same = (values.flatten().unsqueeze(1) - whole).abs() < 1e-12
    at = torch.where(same.any(dim=1), same.int().argmax(dim=1), torch.tensor(UNKNOWN))
    return torch.where(values.flatten() == 0, torch.tensor(ZERO), at).tolist()


def in_files(files: Sequence[Any], whole: torch.Tensor) -> list[list[int]]:
    """The elements that each file has, in its order."""
    tensors = [[leaf for leaf in tree_leaves(file) if isinstance(leaf, torch.Tensor)] for file in files]
    return [[each for leaf in own for each in look_up(leaf.double(), whole)] for own in tensors]
