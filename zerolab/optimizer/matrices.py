"""Matrices: the parameter groups of a model whose hidden matrices have their own optimizer, as with Muon."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from zerolab.engine.units import find_units


def matrices_by(
    optimizer_class: type[torch.optim.Optimizer], **options: Any
) -> Callable[[nn.Module], list[dict]]:
    """Return a function for ``ZeroOptimizer(params=)`` that gives hidden matrices to ``optimizer_class``.

        ZeroOptimizer(model, torch.optim.AdamW, lr=3e-4, params=matrices_by(torch.optim.Muon, lr=0.02))

    These are the parameters with two dimensions in the blocks of a model, as `find_units` finds them, other
    than tables of embeddings. All other parameters, such as a head outside the blocks, norms and biases, are
    left to the ZeroOptimizer's own class. In an nn.Sequential every child is a block, the last one too: write
    the groups of such a model out if its head is not for Muon.
    Raises: TypeError for what is not an optimizer class.
    Source: K. Jordan et al., Muon (https://kellerjordan.github.io/posts/muon), which optimizes hidden layers.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise TypeError(
            f"matrices_by takes an optimizer class, not a {type(optimizer_class).__name__}: write "
            "params=zerolab.matrices_by(torch.optim.Muon, lr=0.02)"
        )
    return partial(_groups, optimizer_class, options)


def _groups(optimizer_class: type[torch.optim.Optimizer], options: dict, model: nn.Module) -> list[dict]:
    """Raises: ValueError for a model without such matrices."""
    of_blocks = {id(p) for unit in find_units(model) if not unit.is_root for p in unit.module.parameters()}
    tables = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    trainable = [p for p in model.parameters() if p.requires_grad]
    is_hidden = lambda p: p.dim() == 2 and id(p) in of_blocks - tables
    hidden = [p for p in trainable if is_hidden(p)]
    if not hidden:
        raise ValueError(
            f"the {type(model).__name__} has no trainable matrix in a block, that is in a child of an "
            f"nn.ModuleList or nn.Sequential: pass its groups as params=[{{'params': [...], 'optimizer': "
            f"{optimizer_class.__name__}}}, ...]"
        )
    others = [p for p in trainable if not is_hidden(p)]
    groups = [{"params": others}] if others else []
    return [*groups, {"params": hidden, "optimizer": optimizer_class} | options]
