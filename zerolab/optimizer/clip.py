"""The norm of gradients that no rank holds whole."""

from collections.abc import Iterable

import torch

from zerolab.collectives import Comm


def global_norm(comm: Comm, gradients: Iterable[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The p-norm over every rank's ``gradients``, each element of the model's gradient held by one rank.

    The norm of a rank's own shard is not the norm, and the sum of the ranks' norms is not either: powers are
    added up, in double precision and rank order, and the root is taken once. So the result is the same at
    every world size. Comm: 8 bytes a rank.
    """
    doubles = [gradient.detach().double().abs() for gradient in gradients]
    zero = torch.zeros((), dtype=torch.float64)
    if norm_type == float("inf"):
        mine = torch.stack([zero, *(each.max().cpu() for each in doubles if each.numel())]).max()
        return comm.exchange(mine).max().float()
    mine = sum((each.pow(norm_type).sum().cpu() for each in doubles), zero)
    return comm.exchange(mine).sum().pow(1.0 / norm_type).float()
