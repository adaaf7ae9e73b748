"""Lesson 08's exercises: stage 2 with fully_shard and in DeepSpeed's JSON, and a choice for each cluster.

No answer is compared with a model answer. A sharded model is trained on ranks, and what it sends and holds
decides. Settings are read as DeepSpeed reads them. Choices are judged by the plan, a rehearsal and the α–β
model.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import zerolab
from zerolab.bench.observe import Ledger
from zerolab.course.attempts import Attempt, Odd, attempt
from zerolab.course.exercise import graded
from zerolab.course.lessons.in_the_wild import clusters
from zerolab.course.lessons.in_the_wild.solution import choose, deepspeed, shard
from zerolab.models import GPT

RANKS, GPUS, MICRO_BATCHES, GLOBAL_BATCH = 2, 4, 2, 64


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
    try:
        shard(model, init_device_mesh(zerolab.device().type, (RANKS,)))
    except TypeError as error:
        if isinstance(model, FSDPModule):  # torch says only that an invariant does not hold
            return {"stopped": str(error)}
        raise
    seen = {
        "psi": psi,
        "root": root,
        "units": sum(isinstance(module, FSDPModule) for module in model.modules()),
        "blocks": [isinstance(block, FSDPModule) for block in model.blocks],
        "whole": _whole(model),
    }
    with Ledger() as ledger:
        model(_batch(dist.get_rank()), _batch(dist.get_rank())).backward()
    sent = [(each.op, each.logical_bytes // 4) for each in ledger.sent]
    return seen | {"whole_after": _whole(model), "sent": sent, "scale": _scale(model)}


def _whole(model: GPT) -> list[str]:
    return [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]


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
    if not seen["units"]:
        return "not written yet: fully_shard was not called, so nothing is sharded"
    if seen["whole"]:
        return (
            f"{len(seen['whole'])} parameters are not sharded, {seen['whole'][0]} first: no rank reduces "
            "their gradients, and the ranks' copies drift apart. Call fully_shard(model, mesh=mesh) too, last"
        )
    if not any(seen["blocks"]):
        return (
            "the whole model is one unit: all of it is gathered at once, and no gradient is freed before "
            "backward ends. Call fully_shard on every block first, then on the model"
        )
    if not all(seen["blocks"]):
        missing = seen["blocks"].index(False)
        return f"block {missing} is no unit of its own, so it is gathered with the root: shard every block"
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
    if (gathered, reduced) != (psi, psi):
        return f"a step gathers {gathered / psi:.2f}Ψ and reduces {reduced / psi:.2f}Ψ; stage 2 has Ψ of each"
    if len(gathers) <= len(seen["blocks"]):
        return f"{len(gathers)} gathers for {len(seen['blocks'])} blocks and the root: blocks share a unit"
    if abs(seen["scale"] - 1) > 1e-3:
        return (
            f"the gradients are {seen['scale']:.3g} times the mean over the ranks: do not change the divisor"
        )
    return None


@graded(
    f"DeepSpeed would shard optimizer state and gradients, compute in bf16, and take {MICRO_BATCHES} "
    f"micro-batches on each of {GPUS} GPUs for a batch of {GLOBAL_BATCH}, in 2Ψ + Ψ of messages at most.",
    call="deepspeed()",
    hints=(
        'the stage is "zero_optimization": {"stage": ...}, and "bf16" is a dictionary too.',
        "a batch is the micro-batch of a GPU, times the micro-batches of a step, times the GPUs. DeepSpeed "
        "wants two of the three numbers.",
        "train_batch_size is 64 and gradient_accumulation_steps is 2.",
    ),
    solution=[deepspeed],
)
def check_json(fn: Callable) -> str | None:
    """Read fn(), a DeepSpeed configuration of stage 2 in bf16 and two micro-batches; say what it means."""
    outcome = attempt(fn, [()])
    return outcome.failure or meaning(_value(outcome))


def meaning(config: Any) -> str | None:
    """What is wrong with a configuration."""
    if not isinstance(config, dict):
        return f"the configuration is a {_kind(config)}: return a dictionary"
    if not config:
        return "not written yet: the configuration is empty"
    return _wrong_stage(config) or _wrong_precision(config) or _wrong_batch(config)


def _wrong_stage(config: dict) -> str | None:
    zero = config.get("zero_optimization")
    if "stage" in config or "zero_stage" in config:
        return '"stage" stands inside "zero_optimization"; at the top DeepSpeed does not look for it'
    if not isinstance(zero, dict) or "stage" not in zero:
        return 'ZeRO is off: "zero_optimization" needs {"stage": ...}, and without it the stage is 0'
    stage = zero["stage"]
    shards = {0: "nothing", 1: "the optimizer state alone", 3: "the parameters too"}
    if stage != 2:
        return f"stage {stage!r} shards {shards.get(stage, 'nothing that DeepSpeed knows')}"
    if zero.get("reduce_scatter") is False:
        return '"reduce_scatter": false all-reduces whole gradients, so a step moves 3Ψ'
    return None


def _wrong_precision(config: dict) -> str | None:
    given = {name: config.get(name) for name in ("bf16", "fp16")}
    half = {name for name, value in given.items() if isinstance(value, dict) and value.get("enabled") is True}
    if half == {"bf16"}:
        return None
    if half == {"fp16"}:
        return "that is fp16, which needs a loss scale; bf16 was asked for"
    if half:
        return "bf16 and fp16 are both enabled, and DeepSpeed refuses that"
    return 'that computes in fp32, which takes 4 + 4 + 8 bytes: "bf16" needs {"enabled": true}'


def _wrong_batch(config: dict) -> str | None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {name: config[name] for name in names if config.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, int) or value < 1:
            return f"{name} is {value!r}: it must be a whole number of 1 or more"
    if len(given) < 2:
        return f"DeepSpeed has to know two of {', '.join(names)}; it computes the third"
    whole, micro, steps = (given.get(name, 0) for name in names)
    steps = steps or whole / micro / GPUS
    micro = micro or whole / steps / GPUS
    product = f"{micro:g} × {steps:g} × {GPUS} GPUs is {micro * steps * GPUS:g}"
    if whole not in (0, micro * steps * GPUS):
        return f"{product}, and train_batch_size is {whole}: DeepSpeed refuses that"
    if steps != MICRO_BATCHES:
        return f"that accumulates {steps:g} micro-batches, and {MICRO_BATCHES} were asked for"
    return None if micro * steps * GPUS == GLOBAL_BATCH else f"{product}, and {GLOBAL_BATCH} was asked for"


@graded(
    "Every choice fits, and no other one that fits is faster by more than 1 % in the model.",
    call="choose(cluster)",
    hints=(
        "begin with the smallest stage, without checkpointing, and let the check say what does not fit.",
        "checkpointing computes forward twice, a third more. Stage 3 moves Ψ more in each micro-batch, which "
        "is little inside a node and much between nodes.",
        "on the 1,024 GPUs the plan fits and the rehearsal does not: units are whole while they compute.",
    ),
    solution=[choose],
)
def check_choices(fn: Callable) -> str | None:
    """Judge fn(name) -> (stage, precision, checkpointing) for each of the six clusters."""
    outcome = attempt(_all_choices, [(fn,)])
    return outcome.failure or judged(_value(outcome))


def _all_choices(fn: Callable) -> dict[str, Any]:
    return {name: fn(name) for name in clusters.CLUSTERS}


def _value(outcome: Attempt) -> Any:
    return outcome.values[0]


def _kind(value: Any) -> str:
    return value.kind if isinstance(value, Odd) else type(value).__name__


def judged(choices: dict[str, Any]) -> str | None:
    """What is wrong with the first choice that is."""
    for name, cluster in clusters.CLUSTERS.items():
        choice = choices[name]
        if choice is None:
            return "not written yet: the function returned None"
        problem = _unusable(choice) or _does_not_run(cluster, *choice) or _too_slow(cluster, *choice)
        if problem:
            return f"{name}: {problem}"
    return None


def _unusable(choice: Any) -> str | None:
    if not isinstance(choice, tuple) or len(choice) != 3:
        return f"{choice!r} is no choice: return (stage, precision, checkpointing)"
    stage, precision, checkpointing = choice
    whole = type(stage) is int and 0 <= stage <= 3
    if not whole or precision not in clusters.PRECISIONS or type(checkpointing) is not bool:
        known = ", ".join(clusters.PRECISIONS)
        return f"{choice!r} is no choice: a stage from 0 to 3, one of {known}, and True or False"
    return None


def _does_not_run(cluster: clusters.Cluster, stage: int, precision: str, checkpointing: bool) -> str | None:
    if precision == "mixed" and cluster.gpu in clusters.WITHOUT_BF16:
        return f"a {cluster.gpu} has no bf16 units: choose mixed_fp16, which scales the loss"
    if clusters.fits(cluster, stage, precision, checkpointing):
        return None
    needed = clusters.needed_bytes(cluster, stage, precision, checkpointing)
    planned = clusters.question(cluster, precision, checkpointing).total_bytes(stage)
    sizes = f"{needed / 1e9:.1f} GB of {cluster.memory_bytes / 1e9:.0f}"
    if planned <= clusters.ROOM * cluster.memory_bytes:
        return (
            f"does not fit: {sizes}. The plan says {planned / 1e9:.1f} GB, but the rehearsal adds "
            f"{(needed - planned) / 1e9:.1f} GB of whole units and gradients on their way"
        )
    lean = clusters.fits(cluster, stage, precision, True)
    way_out = "Checkpointing would make it fit" if lean else "A higher stage shards more of the states"
    return f"does not fit: {sizes}, of which {clusters.ROOM:.0%} can be used. {way_out}"


def _too_slow(cluster: clusters.Cluster, stage: int, precision: str, checkpointing: bool) -> str | None:
    seconds = clusters.step_seconds(cluster, stage, precision, checkpointing)
    best = min(clusters.step_seconds(cluster, *choice) for choice in clusters.choices(cluster))
    if seconds <= 1.01 * best:
        return None
    slower = f"{seconds / best - 1:.0%} slower than the best choice that fits"
    if precision == "fp32":
        return f"{slower}: fp32 leaves the 16-bit matrix units idle"
    if checkpointing and clusters.fits(cluster, stage, precision, False):
        return f"{slower}: it fits without checkpointing, which computes forward twice"
    if stage == 3 and any(other < 3 for other, *_ in clusters.choices(cluster)):
        return f"{slower}: stage 3 moves 3Ψ, and a lower stage fits, which moves 2Ψ"
    return f"{slower}: a higher stage makes room for training without checkpointing"
