"""Clip the gradients of the whole model, by their norm or by value."""

from typing import Any

import torch

from zerolab.optimizer.base import OptimizerBase
from zerolab.optimizer.gradients import clamp_grads, clip_grads


class Clipping(OptimizerBase):
    """The part of ZeroOptimizer that clips gradients."""

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients to a norm of at most ``max_norm`` over all ranks; returns the norm.

        Every rank sums its part in double precision, the parts are added in rank order, so the norm does not
        depend on how many ranks there are. It is rounded to fp32 before the gradients are scaled.

        Comm: 8 bytes a rank.
        Raises: TypeError for what is no number, ValueError for a negative max_norm or norm_type.
        """
        max_norm, norm_type = _as_number("max_norm", max_norm), _as_number("norm_type", norm_type)
        self._finish_grads()
        units, scale = self.engine.trainable, self._gradient_scale
        return clip_grads(self.axes, self.stage, units, max_norm, norm_type, scale)

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Limit each element of the averaged gradients to [-clip_value, clip_value].

        Memory: with fp16, scratch of one unit's owned gradients, and as many flags.
        Raises: TypeError for what is no number, ValueError for a negative clip_value; RuntimeError where
            ranks pass other values.
        """
        clip_value = _as_number("clip_value", clip_value)
        self._finish_grads()
        clamp_grads(self.axes, self.engine.trainable, clip_value, self.loss_scale)


def _as_number(name: str, value: Any) -> float:
    """Return ``value`` as a float. Raises: TypeError for what is no number, such as the parameters."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # the last for a tensor of several elements
        given = repr(value) if isinstance(value, (str, type(None))) else f"a {type(value).__name__}"
        raise TypeError(
            f"{name} is {given}, not a number: pass the number alone and no parameters, as in "
            "optimizer.clip_grad_norm_(1.0) and optimizer.clip_grad_value_(0.5)"
        ) from None
