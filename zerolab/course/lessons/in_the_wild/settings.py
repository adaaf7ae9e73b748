"""Lesson 08's second exercise: stage 2 in DeepSpeed's JSON, which is read as DeepSpeed reads it."""

from collections.abc import Callable
from typing import Any

from zerolab.course.attempts import Odd, attempt
from zerolab.course.exercise import graded
from zerolab.course.lessons.in_the_wild.deepspeed_keys import refused, unread
from zerolab.course.lessons.in_the_wild.solution import deepspeed
from zerolab.course.targets import Reached
from zerolab.course.wording import count

GPUS, MICRO_BATCHES, GLOBAL_BATCH = 4, 2, 64
# DeepSpeed's models of its sections take these for true and for false, in small letters and in capitals.
TRUE, FALSE = ("true", "1", "1.0", "t", "yes", "y", "on"), ("false", "0", "0.0", "f", "no", "n", "off")
ENABLED = '{"enabled": true}'
SHARDED = {0: "nothing", 1: "the optimizer state alone", 3: "the parameters too"}  # by a stage, beside 2
ALL_REDUCE = "use_multi_rank_bucket_allreduce"
PASSED = (
    f"DeepSpeed would shard optimizer state and gradients, compute in bf16, and take {MICRO_BATCHES} "
    f"micro-batches on each of {GPUS} GPUs for a batch of {GLOBAL_BATCH}. By default it sends 2 · 2Ψ + Ψ: an "
    "all-reduce for each micro-batch, and the all-gather."
)


@graded(
    PASSED,
    call="deepspeed()",
    hints=(
        'the stage is "zero_optimization": {"stage": ...}, and "bf16" is a dictionary too.',
        "a batch is the micro-batch of a GPU, times the micro-batches of a step, times the GPUs. From two of "
        "the three numbers DeepSpeed computes the third.",
        "train_batch_size is 64 and gradient_accumulation_steps is 2.",
    ),
    solution=[deepspeed],
)
def check_json(fn: Callable) -> str | None:
    """Read fn(), a DeepSpeed configuration of stage 2 in bf16 and two micro-batches; say what it means."""
    outcome = attempt(fn, [()])
    return outcome.failure or meaning(outcome.values[0]) or _not_by_default(outcome.values[0])


def _not_by_default(config: dict) -> Reached | None:
    """What to say of right settings with which DeepSpeed does not send what it sends by default."""
    if _on(config["zero_optimization"].get(ALL_REDUCE)) is not False:
        return None
    return Reached(
        f"{PASSED} Your settings turn `{ALL_REDUCE}` off, which is on by default. What DeepSpeed sends then "
        "was not measured here"
    )


def meaning(config: Any) -> str | None:
    """Return what is wrong with a configuration, after the keys that DeepSpeed does not read."""
    if not isinstance(config, dict):
        kind = config.kind if isinstance(config, Odd) else type(config).__name__
        if kind == "NoneType":
            return "the function returned None: return a dictionary"
        return f"the configuration is a {kind}: return a dictionary"
    if not config:
        return "not written yet: the configuration is empty"
    wrong = refused(config) or _wrong_stage(config) or _wrong_precision(config) or _wrong_batch(config)
    if wrong and (keys := unread(config)):
        return f"{'. '.join(keys)}. As it is read, {wrong}"
    return wrong


def _no_dictionary(name: str, value: Any, instead: str) -> str:
    return f'"{name}" needs a dictionary, {instead}, and is {value!r}: DeepSpeed stops there'


def _wrong_stage(config: dict) -> str | None:
    zero = config.get("zero_optimization", {})
    if "stage" in config and isinstance(zero, dict) and "stage" in zero:
        return 'the "stage" inside "zero_optimization" counts, and the one at the top does not'
    if zero is True:
        return '"zero_optimization": true is the old form, which means stage 1. Stage 2 is {"stage": 2}'
    if zero is False:
        return 'ZeRO is off: "zero_optimization" is false. Stage 2 is {"stage": 2}'
    if not isinstance(zero, dict):
        return _no_dictionary("zero_optimization", zero, '{"stage": 2}')
    if zero.get("stage", "auto") == "auto":
        auto = '. Nothing but the Trainer of transformers fills in "auto"' * ("stage" in zero)
        return f'ZeRO is off: "zero_optimization" needs {{"stage": ...}}, and without it the stage is 0{auto}'
    if (stage := _stage_of(zero["stage"])) is None:
        return f'"stage" is {zero["stage"]!r}, and has to be 0, 1, 2 or 3: DeepSpeed stops there'
    if stage in SHARDED:
        read = "" if type(zero["stage"]) is int else f'"stage": {zero["stage"]!r} is read as {stage}, and '
        return f"{read}stage {stage} shards {SHARDED[stage]}"
    if _on(zero.get("reduce_scatter")) is False:
        return '"reduce_scatter": false all-reduces whole gradients, so a step moves 3Ψ'
    return None


def _stage_of(value: Any) -> int | None:
    """Return the stage that DeepSpeed reads, also from "2", 2.0 and true; None where it refuses it."""
    try:
        return {0.0: 0, 1.0: 1, 2.0: 2, 3.0: 3}.get(float(value))
    except (TypeError, ValueError, OverflowError):
        return None


def _on(value: Any) -> bool | None:
    """Return what a flag means to DeepSpeed; None where it is not given, or refused."""
    return True if str(value).lower() in TRUE else False if str(value).lower() in FALSE else None


def _wrong_precision(config: dict) -> str | None:
    name = "bf16" if config.get("bf16") is not None else "bfloat16"  # the old name, which is read too
    given = {"bf16": config.get(name) or {}, "fp16": config.get("fp16") or {}}
    for key, value in (("bf16", config.get("bf16")), ("bfloat16", config.get("bfloat16")),
                       ("fp16", config.get("fp16", {}))):  # fmt: skip
        if not isinstance(value, dict) and (value is not None or key == "fp16"):
            return _no_dictionary(key, value, ENABLED)
    for key, value in given.items():
        flag = value.get("enabled", False)
        if _on(flag) is None and flag != "auto":
            return f'"enabled" in "{key}" is {flag!r}, and has to be true or false: DeepSpeed stops there'
    half = {key for key, value in given.items() if _on(value.get("enabled"))}
    if half == {"bf16"}:
        return None
    if half == {"fp16"}:
        return "that is fp16, which needs a loss scale; bf16 was asked for"
    if half:
        return "bf16 and fp16 are both enabled, and DeepSpeed refuses that"
    autocast = config.get("torch_autocast")
    if isinstance(autocast, dict) and _on(autocast.get("enabled")):
        return (
            f'"torch_autocast" keeps parameters in fp32, which takes 4 + 4 + 8 bytes: "bf16" needs {ENABLED}'
        )
    return f'that computes in fp32, which takes 4 + 4 + 8 bytes: "bf16" needs {ENABLED}'


def _wrong_batch(config: dict) -> str | None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {name: config[name] for name in names if config.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            auto = '. Nothing but the Trainer of transformers fills in "auto"' * (value == "auto")
            return f"{name} is {value!r}: it must be a whole number of 1 or more{auto}"
    whole, micro, steps = (given.get(name) for name in names)
    if whole is None and micro is None:
        return f"DeepSpeed stops: it needs {names[0]} or {names[1]}, and computes the others"
    return _of_three(whole, micro, steps)


def _of_three(whole: int | None, micro: int | None, steps: int | None) -> str | None:
    """What the three numbers mean, once DeepSpeed has computed those that are missing, by whole division."""
    given = [number is not None for number in (whole, micro, steps)]
    one_gpu, divided = _of_one_gpu(whole, micro, steps), ""
    if steps is None and whole is not None and micro is not None:
        steps = whole // micro // GPUS
        divided = f"{whole} // {micro} // {GPUS} is {count(steps, 'accumulation step')}"
    steps = 1 if steps is None else steps
    if micro is None and whole is not None:
        micro = whole // GPUS // steps
        divided = f"{whole} // {GPUS} // {steps} is {count(micro, 'sample')}"
    micro = micro or 0
    product = f"{one_gpu}{micro} × {steps} × {GPUS} GPUs is {micro * steps * GPUS}"
    whole = micro * steps * GPUS if whole is None else whole
    if whole != micro * steps * GPUS:
        how = f". It divides without a remainder, and {divided}" if divided else ""
        return f"{product}, and train_batch_size is {whole}: DeepSpeed refuses that{how}. {_asked()}"
    if steps != MICRO_BATCHES:
        many = f"{steps} micro-batch{'es' if steps != 1 else ''}"
        alone = f" of {micro} samples, because nothing else is said" * (sum(given) == 1)
        return f"that accumulates {many}{alone}, and {MICRO_BATCHES} were asked for"
    return None if whole == GLOBAL_BATCH else f"{product}, and {GLOBAL_BATCH} was asked for"


def _of_one_gpu(whole: int | None, micro: int | None, steps: int | None) -> str:
    """Whether the batch that is given is that of one GPU: the one asked for, or that of the other numbers."""
    own = [GLOBAL_BATCH // GPUS, (micro or 0) * (steps or MICRO_BATCHES)]
    if whole is None or whole == GLOBAL_BATCH or whole not in own:
        return ""
    return (
        "train_batch_size is that of all GPUs together, micro-batch × accumulation steps × GPUs, and "
        f"{whole} is that of one GPU. "
    )


def _asked() -> str:
    size = GLOBAL_BATCH // MICRO_BATCHES // GPUS
    asked = f"a batch of {GLOBAL_BATCH} in {MICRO_BATCHES} micro-batches on {GPUS} GPUs"
    return f"Asked for is {asked}, so each micro-batch of a GPU has {size} samples"
