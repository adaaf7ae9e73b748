"""Lesson 09: what is wrong with a momentum that the ranks loaded, and what that tells of save and load."""

from collections.abc import Callable

import torch

Owned = Callable[[int, int], list[torch.Tensor]]
"""From the number of ranks and a rank: which elements of all belong to each of its shards, -1 for padding."""
