"""Lesson 08's first exercise: a sharded model takes a step on ranks, and what there is to see of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import zerolab
from zerolab.bench.observe import Ledger
from zerolab.course.stopped import Stopped
from zerolab.models import GPT

RANKS = 2
MESH_NAMES = ("shard",)  # which the mesh has that fully_shard makes for itself does not


def _model() -> GPT:
    torch.manual_seed(0)
    return GPT(width=32, depth=3, heads=2, context=16).to(zerolab.device())


def _batch(rank: int) -> torch.Tensor:
    return torch.arange(32, device=zerolab.device()).view(2, 16) + 7 * rank


def one_step(shard: Callable) -> dict[str, Any]:
    """In the worker: one forward and backward pass, and what there is to see of it."""
    model = _model()
    sizes = _sizes(model)
    mesh = init_device_mesh(zerolab.device().type, (RANKS,), mesh_dim_names=MESH_NAMES)
    try:
        returned = shard(model, mesh)
    except (TypeError, RuntimeError) as error:
        twice = isinstance(error, TypeError) or "overlapping meshes" in str(error)
        if twice and isinstance(model, FSDPModule):  # torch does not say which call was wrong
            return {"stopped": str(error)}
        raise
    if isinstance(returned, FSDPModule) and not isinstance(model, FSDPModule) and not _whole(model):
        return {"wrapped": type(returned).__name__.removeprefix("FSDP")}
    seen = sizes | _of_the_model(model, returned)
    with Ledger() as ledger, _gloo_renamed():
        model(_batch(dist.get_rank()), _batch(dist.get_rank())).backward()
    sent = [(each.op, each.logical_bytes // 4) for each in ledger.sent]
    return seen | {"whole_after": _whole(model), "sent": sent, "scale": _scale(model)}


def _sizes(model: GPT) -> dict[str, int]:
    psi = sum(p.numel() for p in model.parameters())
    return {"psi": psi, "root": psi - sum(p.numel() for p in model.blocks.parameters())}


def _of_the_model(model: GPT, returned: Any) -> dict[str, Any]:
    """What there is to see before a step."""
    return {
        "root_is_unit": isinstance(model, FSDPModule),
        "units": _units(model),
        "elsewhere": isinstance(returned, nn.Module) and _units(returned),
        "blocks": [isinstance(block, FSDPModule) for block in model.blocks],
        "whole": _whole(model),
        "other_mesh": _on_another_mesh(model),
        "inside": [_units(block) - isinstance(block, FSDPModule) for block in model.blocks],
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}),
    }


@contextmanager
def _gloo_renamed() -> Iterator[None]:
    """Tell an error of torch's that names gloo in other words, as it does not come from a lost message."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "ReduceOp" not in text:
            raise
        advice = ". set_gradient_divide_factor leads to it. Leave it out: the gradients are divided by N"
        text = text.replace("Gloo", "the backend of CPUs") + advice * ("PREMUL_SUM" in text)
        raise Stopped("RuntimeError", text.rstrip("."), "") from None


def _units(model: nn.Module) -> int:
    return sum(isinstance(module, FSDPModule) for module in model.modules())


def _whole(model: GPT) -> list[str]:
    return [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]


def _on_another_mesh(model: GPT) -> list[str]:
    parameters = ((name, p) for name, p in model.named_parameters() if isinstance(p, DTensor))
    return [name for name, p in parameters if p.device_mesh.mesh_dim_names != MESH_NAMES]


def _scale(model: GPT) -> float:
    """How many times the mean over the ranks the gradients are; one parameter tells."""
    gradient = model.head.weight.grad
    if not isinstance(gradient, DTensor):
        return 0.0
    alone = _model()
    losses = [alone(_batch(rank), _batch(rank)) for rank in range(RANKS)]
    torch.stack(losses).mean().backward()
    mean = cast(torch.Tensor, alone.head.weight.grad)
    return (gradient.full_tensor().norm() / mean.norm()).item()
