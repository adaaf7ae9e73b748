"""Change losses before backward: the scale of fp16, and means over unequal counts."""

import math
from typing import cast

import torch

from zerolab.optimizer.base import OptimizerBase


class Losses(OptimizerBase):
    """The part of ZeroOptimizer that turns a loss into what backward is called on."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on, ``optimizer.scale(loss).backward()``: in fp16 a multiple of the loss.

        In any other precision it is the loss itself, so a loop written for fp16 works in all. The step
        divides the gradients again, and is skipped if one overflowed.
        """
        return loss if self.loss_scale is None else self.loss_scale.apply(loss)

    def mean_loss(
        self, loss_sum: torch.Tensor, count: float | None = None, total_count: float | None = None
    ) -> torch.Tensor:
        """This rank's part of a mean over the tokens of all ranks, where ranks have unequal numbers of them.

        Gradients are averaged over ranks, and a mean of means gives a token more weight on a rank that has
        few. So pass the *sum* of the losses of this rank's tokens and how many they are: the gradient is then
        that of the mean over all tokens, as in one process that has all of them. The mean over the ranks of
        the values returned is the mean loss.

        Args:
            count: how many tokens this rank's sum is over; may be 0, but not on all ranks.
            total_count: instead of it, how many there are on all ranks. Where a step has several
                micro-batches, pass with each the same number: `total` of what this rank has in all of them.
        Comm: 8 bytes a rank, unless total_count is given.
        Raises: ValueError for a count that is negative or not finite, for a total of 0, and for neither or
        both.
        """
        if (count is None) == (total_count is None):
            raise ValueError(
                f"count is {count} and total_count {total_count}: pass this rank's count of tokens, or the "
                "total_count of all ranks, and not both"
            )
        total = self.total(cast(float, count)) if total_count is None else total_count
        if not total > 0 or not math.isfinite(total):
            raise ValueError(
                f"there are {total} tokens on all ranks together: pass counts whose total is more than 0"
            )
        return loss_sum * (self.world_size / total)

    def total(self, count: float) -> float:
        """Return the sum of a number over the ranks. Collective. Comm: 8 bytes a rank.

        Raises: ValueError on every rank where a count is negative or not finite.
        """
        counts = self.comm.exchange(torch.tensor(float(count), dtype=torch.float64), "token counts")
        for rank, each in enumerate(counts.tolist()):
            if not each >= 0 or not math.isfinite(each):
                raise ValueError(f"count is {each} on rank {rank}: pass how many tokens it has, 0 or more")
        return counts.sum().item()
