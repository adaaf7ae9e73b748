"""LossScale: a factor on the loss that keeps small gradients above fp16's smallest numbers.

fp16 ends at 6e-8 below and 65,504 above, where bf16 reaches as far as fp32. Gradients of a loss that was
multiplied by a large power of two keep clear of the lower end; where they then hit the upper one, the step is
skipped and the factor halved. Nobody has to choose it: it grows until something overflows.
"""

from collections.abc import Iterable

import torch

from zerolab.collectives import Comm

LARGEST, SMALLEST = 2.0**15, 2.0**-14
"""Where it starts: the largest power of two that a loss's own gradient can be in fp16. And where it ends."""


class LossScale:
    """The factor, and how it follows the run. The same on every rank, because all hear of each overflow.

    Attributes:
        value: what losses are multiplied by now.
        growth_interval: after how many steps without an overflow it doubles; yours to set.
        good_steps: how many there were since it last changed.
        skipped_steps: how many were skipped.
        applied: what the loss was multiplied by whose gradients there are now.
    Source: Micikevicius et al., Mixed Precision Training, §3.2 (arXiv:1710.03740)
    """

    def __init__(self, value: float = LARGEST, growth_interval: int = 2000):
        self.value, self.growth_interval = value, growth_interval
        self.good_steps = self.skipped_steps = 0
        self.applied = 1.0
        self._fresh = False

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the factor."""
        self.applied, self._fresh = self.value, True
        return loss * self.value

    def judge(self, comm: Comm, gradients: Iterable[torch.Tensor], any_used: bool) -> bool:
        """Whether a step has to be skipped, because some rank's gradients have an inf or a NaN; follow it.

        Comm: a byte a rank.
        Raises: RuntimeError where there are gradients of a loss that was not scaled, or where they are not
            finite unscaled either.
        """
        if any_used and not self._fresh:
            raise RuntimeError(
                "precision is 'mixed_fp16' and the loss was not scaled, so small gradients were lost: call "
                "optimizer.scale(loss).backward()"
            )
        mine = not _all_finite(gradients)
        overflowed = bool(comm.exchange(torch.tensor(mine, dtype=torch.uint8), "overflows").any())
        if overflowed and self.applied <= SMALLEST:
            raise RuntimeError(
                f"gradients are not finite, even of a loss scaled by no more than {self.applied:g}: look for "
                "inf or NaN in the data and the loss, or train in 'mixed', whose bf16 reaches as far as fp32"
            )
        self._follow(overflowed)
        return overflowed

    def _follow(self, overflowed: bool) -> None:
        self._fresh = False
        if overflowed:
            self.value, self.good_steps = self.value / 2, 0
            self.skipped_steps += 1
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0

    def state_dict(self) -> dict:
        """What a checkpoint keeps."""
        return {key: getattr(self, key) for key in _STATE}

    def load_state_dict(self, state: dict) -> None:
        """Go on with the factor of another run."""
        for key in _STATE:
            setattr(self, key, state[key])


_STATE = ("value", "growth_interval", "good_steps", "skipped_steps")


def _all_finite(gradients: Iterable[torch.Tensor]) -> bool:
    """On a GPU the CPU waits once. A rehearsal's tensors have no contents that could overflow."""
    flags = [gradient.isfinite().all() for gradient in gradients if not gradient.is_meta]
    return not flags or bool(torch.stack(flags).all())
