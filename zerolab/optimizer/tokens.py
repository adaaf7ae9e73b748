"""Means over the tokens of all ranks, where ranks have unequal numbers of them."""

import math

import torch

from zerolab.collectives import Comm


def total(comm: Comm, count: float) -> float:
    """The sum of a number over the ranks. Comm: 8 bytes a rank.

    Raises: ValueError on every rank where a count is negative or not finite.
    """
    counts = comm.exchange(torch.tensor(float(count), dtype=torch.float64), "token counts")
    for rank, each in enumerate(counts.tolist()):
        if not each >= 0 or not math.isfinite(each):
            raise ValueError(f"count is {each} on rank {rank}: pass how many tokens it has, 0 or more")
    return counts.sum().item()


def part_of_mean(comm: Comm, loss_sum: torch.Tensor, total_count: float) -> torch.Tensor:
    """What a rank has to differentiate for the ranks' mean to be the mean over ``total_count`` tokens.

    Raises: ValueError for a total that is not above 0.
    """
    if not total_count > 0 or not math.isfinite(total_count):
        raise ValueError(
            f"there are {total_count} tokens on all ranks together: pass counts whose total is more than 0"
        )
    return loss_sum * (comm.world_size / total_count)
