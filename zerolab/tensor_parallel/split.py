"""parallelize: replace pairs of linear layers in a model by this rank's part of them."""

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import nn

from zerolab.models import Block
from zerolab.storages import is_dtensor
from zerolab.tensor_parallel.cuttable import refuse_what_parts_lack
from zerolab.tensor_parallel.group import TensorParallel
from zerolab.tensor_parallel.layers import ColumnParallelLinear, ParallelLinear, RowParallelLinear

Pair = tuple[nn.Linear, nn.Linear] | tuple[nn.Linear, nn.Linear, int]
"""The layer that is cut by its outputs, the one that is cut by its inputs, and the sections of the first."""


@torch.no_grad()
def parallelize(model: nn.Module, parallel: TensorParallel, pairs: Iterable[Pair] | None = None) -> nn.Module:
    """Cut pairs of linear layers of ``model`` over the ranks, in place; returns the model.

    All parameters and buffers become rank 0's first. Between the layers of a pair the model may only work on
    each feature alone, or on groups of them that stay together, such as an attention's heads, and may have no
    trainable parameter: each rank would have a part of its gradient.

    Args:
        model: any module; the course's GPT needs no ``pairs``.
        parallel: the ranks to cut it over.
        pairs: by default the attention and the MLP of each `zerolab.models.Block`. ``(column, row)`` for
            others, or ``(column, row, 3)`` where the first makes queries, keys and values.

    A model on the meta device may be cut too. ZeroOptimizer then gives each part its memory, and the start
    values that the whole layer draws on rank 0.

    Memory: the whole model on every rank, until it is cut; on the meta device none. Comm: Ψ, a broadcast.
    Raises: ValueError for sizes that the number of ranks does not divide, for a layer that is no part of the
        model or was cut before, for one that is shared, tied, parametrized or hooked, for DTensor parameters,
        and where there is no pair; TypeError for anything but a module and a TensorParallel.
    """
    _check_types(model, parallel)
    found = [(*pair, 1)[:3] for pair in (_pairs_of_blocks(model, parallel.size) if pairs is None else pairs)]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no zerolab.models.Block: name its pairs of linear layers, as in "
            "parallelize(model, parallel, pairs=[(mlp.up, mlp.down), ...])"
        )
    names = {module: name for name, module in model.named_modules()}
    for column, row, sections in found:
        _check(names, column, row, sections, parallel.size)
        refuse_what_parts_lack(model, column, ("weight", "bias"))
        refuse_what_parts_lack(model, row, ("weight",))
    layers = [layer for column, row, _ in found for layer in (column, row)]
    if twice := [names[layer] for layer in layers if layers.count(layer) > 1]:
        raise ValueError(f"pairs: {twice[0]} is in two pairs, or twice in one: name each layer once")
    for name, values in chain(model.named_parameters(), model.named_buffers()):
        parallel.copy_from_rank_0(name, values)
    for column, row, sections in found:
        model.set_submodule(names[column], ColumnParallelLinear(column, parallel, names[column], sections))
        model.set_submodule(names[row], RowParallelLinear(row, parallel, names[row]))
    return model


def _check_types(model: nn.Module, parallel: TensorParallel) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}: pass an nn.Module")
    if not isinstance(parallel, TensorParallel):
        raise TypeError(
            f"parallel is {type(parallel).__name__}: pass zerolab.TensorParallel(group), with the process "
            "group of the ranks that share one copy of the model"
        )
    for name, module in model.named_modules():
        if isinstance(module, ParallelLinear):
            raise ValueError(f"{name} was cut by parallelize() before: cut a model once, with all its pairs")
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            raise ValueError(
                f"parameter {name} is a DTensor, which PyTorch's own parallelism has cut: pass a model with "
                "plain parameters"
            )


def _pairs_of_blocks(model: nn.Module, size: int) -> Iterator[Pair]:
    for block in (module for module in model.modules() if isinstance(module, Block)):
        heads = block.query_key_value.out_features // 3 // block.head_width
        if heads % size:
            raise ValueError(
                f"an attention has {heads} heads, which {size} tensor-parallel ranks do not divide: take a "
                f"number of ranks that divides {heads}, or a model with more heads"
            )
        yield block.query_key_value, block.attention_out, 3
        yield block.mlp_in, block.mlp_out


def _check(names: dict, column: nn.Linear, row: nn.Linear, sections: int, size: int) -> None:
    for layer in (column, row):
        if not isinstance(layer, nn.Linear) or layer not in names:
            raise ValueError(
                f"pairs: {layer!r} is no linear layer of the model: pass nn.Linear modules that are found in "
                "model.modules(), each once"
            )
        if type(layer).forward is not nn.Linear.forward or "forward" in vars(layer):
            raise ValueError(
                f"{names[layer]} is a {type(layer).__name__} with a forward of its own, which its part would "
                "not have: take a plain nn.Linear, and do the rest in the module around it"
            )
    if column.out_features % sections:
        raise ValueError(
            f"{names[column]} has {column.out_features} outputs, which {sections} sections do not divide: "
            "pass the number of equal sections, 3 for queries, keys and values"
        )
    for layer, numel in ((column, column.out_features // sections), (row, row.in_features)):
        if numel % size:
            raise ValueError(
                f"{names[layer]} has {numel} features to cut, which {size} tensor-parallel ranks do not "
                f"divide: take a number of ranks that divides {numel}, or a model of another width"
            )
