"""Lesson 08's first exercise: stage 2 with fully_shard.

No answer is compared with a model answer. A sharded model is trained on ranks, and what it sends and holds
decides.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import zerolab
from zerolab.bench.observe import Ledger
from zerolab.course.attempts import attempt
from zerolab.course.exercise import graded
from zerolab.course.lessons.in_the_wild.solution import shard
from zerolab.models import GPT

RANKS = 2
MESH_NAMES = ("shard",)  # which the mesh has that fully_shard makes for itself does not


@graded(
    "On two ranks your model moves 2Ψ a step: one all-gather, one reduce-scatter, one block at a time. At "
    "rest each rank holds half of everything, and the gradients are the mean.",
    call="shard(model, mesh)",
    hints=(
        "fully_shard(module, mesh=mesh) makes a unit of the module's parameters, other than those that are "
        "in a unit already. So begin with the blocks.",
        "reshard_after_forward says whether a unit is freed after its forward and gathered again for "
        "backward. At stage 2 it is not.",
        "embedding, norm and head are outside of the blocks. fully_shard(model, mesh=mesh) takes them, last.",
    ),
    solution=[shard],
)
def check_shard(fn: Callable) -> str | None:
    """Call fn(model, mesh) on two ranks, take a step, and name what its messages and its gradients say."""
    outcome = attempt(partial(_step, fn), [()] * RANKS, timeout=60.0)
    if outcome.failure:
        return outcome.failure.splitlines()[0]
    return _not_sharded(outcome.values[0]) or _not_stage_2(outcome.values[0])


def _model() -> GPT:
    torch.manual_seed(0)
    return GPT(width=32, depth=3, heads=2, context=16).to(zerolab.device())


def _batch(rank: int) -> torch.Tensor:
    return torch.arange(32, device=zerolab.device()).view(2, 16) + 7 * rank


def _step(shard: Callable) -> dict[str, Any]:
    """In the worker: one forward and backward pass, and what there is to see of it."""
    model = _model()
    psi = sum(p.numel() for p in model.parameters())
    root = psi - sum(p.numel() for p in model.blocks.parameters())
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
    seen = {
        "root_is_unit": isinstance(model, FSDPModule),
        "psi": psi,
        "root": root,
        "units": _units(model),
        "elsewhere": isinstance(returned, nn.Module) and _units(returned),
        "blocks": [isinstance(block, FSDPModule) for block in model.blocks],
        "whole": _whole(model),
        "other_mesh": _on_another_mesh(model),
    }
    with Ledger() as ledger:
        model(_batch(dist.get_rank()), _batch(dist.get_rank())).backward()
    sent = [(each.op, each.logical_bytes // 4) for each in ledger.sent]
    return seen | {"whole_after": _whole(model), "sent": sent, "scale": _scale(model)}


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


def _not_sharded(seen: dict[str, Any]) -> str | None:
    if "stopped" in seen:
        return "the model was sharded before its blocks, so they are cut twice: fully_shard(model) comes last"
    if "wrapped" in seen:
        return (
            f"fully_shard was called on a {seen['wrapped']} around the model, and not on the model: a "
            "forward of the model itself does not gather the root's parameters. Call "
            "fully_shard(model, mesh=mesh)"
        )
    if not seen["units"] and seen["elsewhere"]:
        return (
            "the model that your function returned is sharded, and the one that it was called with is not: "
            "fully_shard works in place, so call it on model and its blocks themselves, and not on a copy"
        )
    if not seen["units"]:
        return "not written yet: fully_shard was not called, so nothing is sharded"
    if seen["whole"] and seen["root_is_unit"]:
        return (
            f"fully_shard(model) leaves {len(seen['whole'])} parameters whole, {seen['whole'][0]} first: no "
            "rank reduces their gradients, and the ranks' copies drift apart. Do not pass ignored_params"
        )
    if seen["whole"]:
        return (
            f"{len(seen['whole'])} parameters are not sharded, {seen['whole'][0]} first: no rank reduces "
            "their gradients, and the ranks' copies drift apart. Call fully_shard(model, mesh=mesh) too, last"
        )
    if not any(seen["blocks"]) and seen["units"] > 1:
        return (
            f"no block is a unit of its own: the model has {seen['units']} other units, each with an "
            "all-gather and a reduce-scatter of its own. Make one unit of each block, then one of the model"
        )
    if not any(seen["blocks"]):
        return (
            "the whole model is one unit: all of it is gathered at once, and no gradient is freed before "
            "backward ends. Call fully_shard on every block first, then on the model"
        )
    if not all(seen["blocks"]):
        missing = seen["blocks"].index(False)
        return f"block {missing} is no unit of its own, so it is gathered with the root: shard every block"
    if seen["other_mesh"]:
        return (
            f"{len(seen['other_mesh'])} parameters, {seen['other_mesh'][0]} first, are not sharded over the "
            "mesh that your function gets. Without mesh=mesh fully_shard makes one of all ranks. These are "
            "the same two ranks here, and others where a mesh has some of them. Pass mesh=mesh to every call"
        )
    if seen["whole_after"]:
        return (
            "parameters stay whole after backward, so at rest a rank holds all of them: let it reshard them"
        )
    return None


def _not_stage_2(seen: dict[str, Any]) -> str | None:
    psi, root = seen["psi"], seen["root"]
    gathers = [numel for op, numel in seen["sent"] if op == "_allgather_base"]
    gathered, reduced = sum(gathers), sum(n for op, n in seen["sent"] if op == "_reduce_scatter_base")
    if reduced == 0:
        return "no gradient was reduced: set_requires_gradient_sync(False) is for micro-batches but the last"
    if gathered == 2 * psi - root:
        return (
            "that is stage 3: after forward each block is freed, and backward gathers it again, 3Ψ - Ψ_root "
            "in all. Keep the blocks whole between forward and backward"
        )
    if gathered == 2 * psi:
        return "that is stage 3, and the root is gathered twice too: 3Ψ. Keep parameters whole after forward"
    if psi in (2 * gathered, 2 * reduced):
        return (
            f"the bytes of a step are those of {gathered / psi:.2f}Ψ gathered and {reduced / psi:.2f}Ψ "
            "reduced in fp32: messages of 16-bit numbers have half of the bytes. A mixed-precision policy "
            "makes them so. Leave mp_policy out"
        )
    if (gathered, reduced) != (psi, psi):
        said = f"a step gathers {gathered / psi:.2f}Ψ and reduces {reduced / psi:.2f}Ψ; stage 2 has Ψ of each"
        return said + _gathered_again(seen, gathered - psi)
    if len(gathers) <= len(seen["blocks"]):
        return f"{len(gathers)} gathers for {len(seen['blocks'])} blocks and the root: blocks share a unit"
    if abs(seen["scale"] - 1) > 1e-3:
        return (
            f"the gradients are {seen['scale']:.3g} times the mean over the ranks: do not change the divisor"
        )
    return None


def _gathered_again(seen: dict[str, Any], more: int) -> str:
    """Which units a surplus of gathered elements is made of: the root, some blocks, or both."""
    blocks, root = len(seen["blocks"]), seen["root"]
    block = (seen["psi"] - root) // blocks
    for with_root, many in product((0, 1), range(blocks + 1)):
        if more and more == with_root * root + many * block:
            which = [f"{many} of the {blocks} blocks"] * bool(many) + ["the root"] * with_root
            verb = "is" if which == ["the root"] or (many == 1 and not with_root) else "are"
            return (
                f". {' and '.join(which)} {verb} gathered twice: freed after forward, and gathered again for "
                "backward. Pass reshard_after_forward=False there"
            )
    return ""
