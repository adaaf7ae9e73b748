"""Lesson 08's second exercise: stage 2 in DeepSpeed's JSON, which is read as DeepSpeed reads it."""

from collections.abc import Callable
from typing import Any

from zerolab.course.attempts import Odd, attempt
from zerolab.course.exercise import graded
from zerolab.course.lessons.in_the_wild.solution import deepspeed

GPUS, MICRO_BATCHES, GLOBAL_BATCH = 4, 2, 64


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
    return outcome.failure or meaning(outcome.values[0])


def meaning(config: Any) -> str | None:
    """Return what is wrong with a configuration."""
    if not isinstance(config, dict):
        kind = config.kind if isinstance(config, Odd) else type(config).__name__
        return f"the configuration is a {kind}: return a dictionary"
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
    if given["bf16"] is None:
        given["bf16"] = config.get("bfloat16")  # the old name, which DeepSpeed reads too
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
