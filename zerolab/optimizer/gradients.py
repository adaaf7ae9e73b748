"""Compute the norm of sharded gradients, clip them by norm or by value, and gather them for inspection."""

from collections.abc import Iterable, Sequence

import torch

from zerolab.collectives import GRADIENTS_FROM, Comm
from zerolab.optimizer.axes import Axes
from zerolab.optimizer.loss_scale import LossScale
from zerolab.optimizer.slices import disjoint_grads
from zerolab.stages.base import Stage
from zerolab.unit import FlatUnit
from zerolab.unit.span import Span


class GradientsOf:
    """Identifies a message as a unit's gradients, so that no rank takes them for parameters."""

    def __init__(self, unit: FlatUnit):
        self.name, self.index = f"gradients of {unit.name}", unit.index + GRADIENTS_FROM
        self.numel, self.cuts, self.describe = unit.numel, unit.cuts, unit.describe


def clip_grads(
    axes: Axes,
    stage: Stage,
    units: list[FlatUnit],
    max_norm: float,
    norm_type: float,
    scale: float,
) -> torch.Tensor:
    """Average the gradients, and scale them to a norm of at most ``max_norm``; returns the norm before that.

    Args:
        axes: the ranks over which the norm is.
        scale: the factor of a scaled loss, by which the gradients are too large.
    Comm: 8 bytes a rank of each axis. Raises: ValueError for a negative max_norm or norm_type.
    """
    if not max_norm >= 0 or not norm_type > 0:
        raise ValueError(
            f"max_norm is {max_norm} and norm_type {norm_type}: pass max_norm >= 0 and norm_type > 0"
        )
    for unit in units:
        unit.grads.average()
    about = f"norms to clip to {max_norm} in L{norm_type}"
    norm = global_norm(axes.comms, disjoint_grads(stage, units, axes), norm_type, about) / scale
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for unit in units:
        unit.grads.reduced *= factor  # on a GPU too: a number on the CPU is passed to the kernel
    return norm


def clamp_grads(axes: Axes, units: list[FlatUnit], clip_value: float, loss_scale: LossScale | None) -> None:
    """Average the gradients, and limit each element to [-clip_value, clip_value].

    A NaN stays, and so does an infinity of a scaled loss: the step has to be skipped for it.

    Args: axes: the ranks that have to pass the same value.
    Memory: with ``loss_scale``, scratch of one unit's owned gradients, and as many flags.
    Comm: none but the check. Raises: ValueError for a negative clip_value; RuntimeError for other values.
    """
    if not clip_value >= 0:
        raise ValueError(f"clip_value is {clip_value}: pass clip_value >= 0")
    axes.everyone.check_same_collective(f"values to clip to {clip_value}")
    for unit in units:
        unit.grads.average()
        gradients = unit.grads.reduced
        if loss_scale is None:
            gradients.clamp_(-clip_value, clip_value)
        else:
            bound = min(clip_value * loss_scale.applied, torch.finfo(gradients.dtype).max)
            torch.where(gradients.isinf(), gradients, gradients.clamp(-bound, bound), out=gradients)


def global_norm(
    comms: Sequence[Comm], gradients: Iterable[torch.Tensor], norm_type: float, about: str = "norms"
) -> torch.Tensor:
    """The p-norm over every rank's ``gradients``, each element of the model's gradient held by one rank.

    Neither the norm of one rank's shard nor the sum of the ranks' norms is the global norm. It is the norm of
    the ranks' norms, in rank order. All are taken in double precision and rounded once, so the result is the
    same at every world size.

    Memory: one of the gradients in double precision. On a GPU the CPU waits for the device once.
    Comm: 8 bytes a rank of each axis.
    """
    norms = [torch.linalg.vector_norm(each.detach(), norm_type, dtype=torch.float64) for each in gradients]
    mine = torch.stack(norms).cpu() if norms else torch.zeros(1, dtype=torch.float64)
    norm = torch.linalg.vector_norm(mine, norm_type)
    for comm in comms:
        norm = torch.linalg.vector_norm(comm.exchange(norm, about), norm_type)
    return norm.float()


def whole_grads(
    stage: Stage, units: list[FlatUnit], used: set[Span], scale: float
) -> dict[str, torch.Tensor]:
    """Return the averaged gradients of the parameters that were used, by name.

    Gradients of a scaled loss are divided in fp32, because 16 bits might not hold the result.
    """
    found: dict[str, torch.Tensor] = {}
    for unit in units:
        dtype = unit.grads.dtype if scale == 1 else torch.float32
        flat = torch.zeros(unit.padded_numel, dtype=dtype, device=unit.device)
        flat[unit.owned] = unit.grads.mean().to(dtype) / scale
        stage.comm.all_gather(flat, GradientsOf(unit)).wait()
        found |= {span.name: span.view(flat) for span in unit.spans if span in used}
    return found
